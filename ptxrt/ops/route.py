"""Mixtures of experts: `route` sorts tokens by expert, `combine` adds the results of the experts."""

from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, overload

import numpy as np

from ..accuracy import Tolerance
from ..array import DeviceArray, as_arrays, check_forward
from ..declaration import In, Out, loose, unaligned
from ..errors import ArgumentError
from ..formats import bf16, f16, f32, format_of, i32
from ..kernel import kernel
from ..prepared import remembered
from .place import Place, has_whole_rows, without_gaps
from .quantized import unquantized, whole_number
from .scales import fill_f32

if TYPE_CHECKING:
    from ..typing import Array, HostArray, StreamLike, WholeNumbers


def _example_ids(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    """Examples of ids: some experts have no rows, and there is padding of both kinds."""
    return rng.choice(np.array([-1, *range(axes["blocks"] + 1)], np.int32), shape)


def _example_places(rng: np.random.Generator, member, shape, axes) -> np.ndarray:
    return rng.integers(-1, axes["rows"], shape).astype(np.int32)


_SIZES = ((1, 1, 2), (5, 3, 5), (100, 2, 9), (300, 6, 129))


@kernel(
    grid="blocks",
    cases=[dict(tokens=tokens, chosen=chosen, blocks=blocks) for tokens, chosen, blocks in _SIZES],
    draw=dict(expert_ids=_example_ids),
)
def sort_tokens(
    expert_ids: In[i32, "tokens chosen", unaligned],
    order: Out[i32, "tokens*chosen", unaligned],
    starts: Out[i32, "blocks", unaligned],
    places: Out[i32, "tokens chosen", unaligned],
):
    """Sort tokens by the experts that they chose; `blocks` is the number of experts plus 1.

    order: the token of each sorted row; the rows of an expert keep the order of tokens. starts: where the rows of each
    expert begin, and where the last ones end; rows of ids outside the experts follow. places: the row of each id, -1
    for an id outside the experts.
    """
    experts = len(starts) - 1
    ids = np.where((expert_ids < 0) | (expert_ids >= experts), experts, expert_ids).reshape(-1)
    rows = np.argsort(ids, kind="stable")
    order[:] = rows // expert_ids.shape[1]
    starts[:] = np.searchsorted(ids[rows], np.arange(experts + 1))
    where = np.empty(ids.size, np.int64)
    where[rows] = np.arange(ids.size)
    places[:] = np.where(ids == experts, -1, where).reshape(places.shape)


@kernel(
    grid="cols tokens",
    cases=[
        dict(rows=rows, cols=cols, tokens=tokens, chosen=chosen)
        for rows, cols, tokens, chosen in ((3, 8, 2, 1), (20, 1030, 7, 4), (9, 33, 5, 3))
    ],
    tolerance=Tolerance("float32 sums, rounded to the type of x", relative_l2=3e-3),
    draw=dict(places=_example_places),
)
def add_experts(
    x: In[f32 | f16 | bf16, "rows cols", loose],
    places: In[i32, "tokens chosen", unaligned, "rows"],
    weights: In[f32, "tokens chosen", unaligned],
    y: Out[f32 | f16 | bf16, "tokens cols"],
):
    """Add for each token the rows of x at its places, each times its weight, in float32 and in order; places of -1 are
    skipped.
    """
    y[:] = 0
    for token, expert in np.ndindex(places.shape):
        if places[token, expert] >= 0:
            y[token] += weights[token, expert] * x[places[token, expert]].astype(np.float64)


class Routing(NamedTuple):
    """Tokens sorted by expert, int32.

    Attributes:
        order: [T k]: the token of each sorted row. Rows of an expert keep the order of tokens.
        starts: [experts + 1]: the rows of expert e are starts[e] to starts[e + 1]; padding follows the last expert.
        places: [T, k]: the sorted row of each token and choice; -1 for padding.
    """

    order: Any
    starts: Any
    places: Any


@remembered
def route(expert_ids: "WholeNumbers", experts: SupportsIndex, *, stream: "StreamLike" = None) -> Routing:
    """Sort tokens by the experts that they chose.

    `matmul_grouped(x, w, starts, rows=order)` multiplies the sorted rows, `combine` adds the products. On the host rows
    of padding are left out: `rows=order[: starts[-1]]`. Kernel: `sort_tokens`.

    Args:
        expert_ids: Whole numbers [T, k]; negative ones are padding. In NumPy arrays ids must be below `experts`. A
            device array, int32, is not checked: ids from `experts` on count as padding.
        experts: The number of experts.
        stream: A stream of the device; None is the library's own.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    (ids,) = as_arrays("route", expert_ids=expert_ids)
    count = whole_number(experts)
    if count is None or not 0 < count < 2**31 - 1:
        raise ArgumentError(f"route: experts is {experts!r}; pass a whole number from 1 to {2**31 - 2}")
    experts = count
    kind = ids.dtype == np.int32 if isinstance(ids, DeviceArray) else ids.dtype.kind in "iu"
    if len(ids.shape) != 2 or not kind:
        raise ArgumentError(
            f"route: expert_ids are {ids.dtype} {list(ids.shape)}; pass whole numbers [tokens, experts of each], "
            "int32 on a device"
        )
    if isinstance(ids, np.ndarray):
        if ids.size and ids.max() >= experts:
            raise ArgumentError(
                f"route: expert_ids go up to {ids.max()}; there are {experts} experts, pass ids below, or negative "
                "ones for padding"
            )
        ids = (ids if ids.dtype.kind == "u" else np.maximum(ids, -1)).astype(np.int32)
    check_forward("route", expert_ids=ids)
    place = Place([ids], stream)
    if not ids.size:
        shapes = ((0,), (experts + 1,), tuple(ids.shape))
        if place.on_host:
            return Routing(*(np.zeros(shape, np.int32) for shape in shapes))
        order, starts, places = (place.empty(shape, i32) for shape in shapes)
        fill_f32(x=starts.view(np.float32), value=0.0, stream=stream)
        return Routing(order, starts, places)
    sorted_ids = sort_tokens(without_gaps(ids, place), blocks=experts + 1, stream=stream)
    return Routing(*(place.back(x) for x in sorted_ids))


@overload
def combine(y: "HostArray", routing: Routing, weights: "HostArray", *, stream: "StreamLike" = ...) -> "HostArray": ...
@overload
def combine(y: DeviceArray, routing: Routing, weights: "Array", *, stream: "StreamLike" = ...) -> DeviceArray: ...
@overload
def combine(y: "Array", routing: Routing, weights: "Array", *, stream: "StreamLike" = ...) -> Any: ...
@remembered
def combine(y: "Array", routing: Routing, weights: "Array", *, stream: "StreamLike" = None) -> Any:
    """Add the results of each token's experts, each times its weight: [T, N] of y's type.

    Sums are float32, in the order of a token's experts. Places of -1 are skipped, so that rows after the last expert's
    are not read. Kernel: `add_experts`.

    Args:
        y: float32, float16 or bfloat16 rows [R, N] in the order of `routing`. If `routing` is on the host, the rows of
            padding may be left out.
        routing: The result of `route`.
        weights: float32 [T, k].
        stream: A stream of the device; None is the library's own.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    if not isinstance(routing, Routing):
        raise ArgumentError(f"combine: routing is a {type(routing).__name__}; pass what route gives")
    y, weights = unquantized("combine", y=y, weights=weights)
    order, starts, places = _checked_routing(routing)
    if len(y.shape) != 2 or format_of(y.dtype) is None:
        raise ArgumentError(f"combine: y is {y.dtype} {list(y.shape)}; pass float32, float16 or bfloat16 [rows, N]")
    if tuple(weights.shape) != tuple(places.shape) or not f32.holds(weights.dtype):
        raise ArgumentError(
            f"combine: weights are {weights.dtype} {list(weights.shape)}; pass float32 {list(places.shape)}"
        )
    rows = order.shape[0]
    least = int(starts[-1]) if isinstance(starts, np.ndarray) else rows
    if not least <= y.shape[0] <= rows:
        without = f", or {least} without padding" if least < rows else ""
        raise ArgumentError(f"combine: y has {y.shape[0]} rows, the routing {rows}; pass one row for each{without}")
    if isinstance(places, np.ndarray) and places.size and places.max() >= y.shape[0]:
        received = f"routing.places go up to {places.max()}"
        raise ArgumentError(f"combine: {received}; y has {y.shape[0]} rows, pass places below, or -1 for padding")
    check_forward("combine", y=y, weights=weights)
    place = Place([y, weights, places], stream)
    if not y.shape[0]:  # all ids are padding: the kernel reads no row, but takes no empty array
        y = np.zeros((1, y.shape[1]), y.dtype)
    if not places.shape[1]:  # nor tokens without experts
        weights, places = (np.full((places.shape[0], 1), value, kind) for value, kind in ((0, "f4"), (-1, "i4")))
    y = place.put(y)
    y = y if has_whole_rows(y) else y.copy(stream=stream)
    weights, places = (without_gaps(x, place) for x in (weights, places))
    return place.back(add_experts(y, places, weights, stream=stream))


def _checked_routing(routing: Routing) -> tuple[Any, Any, Any]:
    """Return the arrays of a routing; ArgumentError unless each has the type and the axes of those of `route`."""
    arrays = as_arrays("combine", **{f"routing.{name}": x for name, x in routing._asdict().items()})
    for (name, axes), x in zip(dict(order="[T k]", starts="[experts + 1]", places="[T, k]").items(), arrays):
        known = len(x.shape) == (2 if name == "places" else 1) and x.dtype == np.int32
        if not known or (name == "starts" and not x.shape[0]):
            received = f"routing.{name} is {x.dtype} {list(x.shape)}"
            raise ArgumentError(f"combine: {received}; pass int32 {axes}, as route gives")
    return arrays
