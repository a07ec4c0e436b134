"""`KVCache`: keys and values of many sequences in pages, 16-bit or quantized, with functions that write, copy and read
them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from ..array import Box, DeviceArray, as_arrays, as_output, empty, is_foreign, refuse_pickle, refuse_recording, upload
from ..blocks import BLOCK_FORMATS
from ..errors import ArgumentError
from ..formats import Format, bf16, f16, format_of, to_convert
from ..prepared import guard_recorded
from .append import APPEND, UNCLAIMED, claim_slots
from .attention_few import ARRIVALS, MIXED_DIM
from .operands import operand_rule, shown, whole_numbers, with_whole_rows
from .pages import copy_rows, find_slots, unpack_pages
from .scales import fill_f32

if TYPE_CHECKING:
    from ..typing import Array, AttentionFormatName, HostArray, Number, Numbers, ScaleRule, StreamLike, WholeNumbers

FORMATS = ("bf16", "f16", "mxfp8", "mxfp4", "nvfp4")
_PLAIN = {"bf16": bf16, "f16": f16}
# Kernels load rows of codes in vectors of this many bytes.
_ALIGNMENT = 16


class KVCache:
    """Keys and values of many sequences, token by token in pages, in 16 bits or in a block format.

        cache = ptxrt.KVCache(pages=1024, page_size=16, heads=8, dim=128, format="nvfp4")
        cache.append(k, v, slots)
        out = ptxrt.attention_paged(q, cache, block_table, key_lengths)

    Blocks lie along the head dimension, so that all bytes of a token are final when it is written.

    Args:
        pages: The number of pages.
        page_size: Tokens of a page.
        heads: The number of heads of keys and values.
        dim: The head dimension of keys: up to 256, a multiple of 8 in 16 bits and of 32 in block formats.
        dim_v: The head dimension of values; None is dim.
        format: "bf16", "f16", "mxfp8", "mxfp4" or "nvfp4". float16 cannot hold all products of codes and scales of
            mxfp8 and mxfp4: with these formats, queries in float16 are multiplied in bfloat16 (`multiplied`).
        format_v: The format of values; None is format. All pairs work, except that f16 needs nvfp4 or f16 beside it,
            and that 16 bits beside a block format need head dimensions up to 128.
        k_global: Factor of codes times scales of keys, above 0: a number, one for each head, or float32 on the device,
            one or one for each head, whose values are not checked and are read when the cache is made. Other quantizers
            may expect the reciprocal 1 / g.
        v_global: The same for values.
        k_mean: Floats [heads, dim], subtracted from keys before they are quantized. It is fixed before the first key is
            written. Scores are those of the original keys.
        scale_rule: As in `quantize`, for all formats with scales; None is "rceil" for mxfp8, "even" for mxfp4, "amax"
            for nvfp4.
        device: The number of the device; None is the current one.

    Attributes:
        arrays: The arrays k, k_scales, v and v_scales by name: [pages, heads, page_size, bytes or values]; None for
            scales of 16-bit formats.
        nbytes: Bytes of all arrays.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
        OutOfMemory: The device has no room.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        heads: int,
        dim: int,
        dim_v: int | None = None,
        *,
        format: AttentionFormatName = "nvfp4",
        format_v: AttentionFormatName | None = None,
        k_global: Numbers | Number = 1.0,
        v_global: Numbers | Number = 1.0,
        k_mean: Array | None = None,
        scale_rule: ScaleRule | None = None,
        device: int | None = None,
    ):
        refuse_recording("a new cache would be initialized by them alone")
        sizes = dict(pages=pages, page_size=page_size, heads=heads, dim=dim, dim_v=dim if dim_v is None else dim_v)
        for name, size in sizes.items():
            if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
                raise ArgumentError(f"KVCache: {name} is {size!r}; pass a whole number of at least 1")
        self._describe("KVCache", format, format_v, *map(int, sizes.values()))
        shapes = self._shapes()
        self.k, self.k_scales, self.v, self.v_scales = (
            shape and empty(shape, member.dtype, device=device) for shape, member in shapes.values()
        )
        self._finish("KVCache", self.k.backend, k_global, v_global, k_mean, scale_rule)

    @classmethod
    def over(
        cls,
        k_codes: Array,
        k_scales: Array | None,
        v_codes: Array,
        v_scales: Array | None,
        *,
        format: AttentionFormatName,
        format_v: AttentionFormatName | None = None,
        layout: Literal["hnd", "nhd"] = "hnd",
        k_global: Numbers | Number = 1.0,
        v_global: Numbers | Number = 1.0,
        k_mean: Array | None = None,
        scale_rule: ScaleRule | None = None,
    ) -> "KVCache":
        """Make a cache over existing device memory, such as an inference engine's, of any strides; nothing is copied.

        Arrays are [pages, heads, page_size, ..] with layout="hnd", [pages, page_size, heads, ..] with "nhd". The last
        axis has no gaps: dim values of 16 bits, dim bytes of mxfp8, dim / 2 bytes of 4-bit formats, dim / 32 or dim /
        16 bytes of scales (None in 16 bits). Codes are uint8, or float8_e4m3fn of mxfp8; scales are uint8, or
        float8_e8m0fnu of MX formats and float8_e4m3fn of nvfp4. Rows of codes start at multiples of 16 bytes, rows of
        scales anywhere.
        Caches for SM100 have the scales of V swizzled, four tokens at a time. This cannot be detected: call
        `unswizzle_values` on such scales first, or values are multiplied with the scales of other tokens.

        Raises:
            ArgumentError: An argument is invalid; the message names it.
        """
        refuse_recording("a new cache would be initialized by them alone")
        if not isinstance(layout, str) or layout not in ("hnd", "nhd"):
            raise ArgumentError(f"KVCache.over: layout is {layout!r}; pass 'hnd' or 'nhd'")
        arguments = dict(k_codes=k_codes, k_scales=k_scales, v_codes=v_codes, v_scales=v_scales)
        arrays = {name: as_output("KVCache.over", name, x) if is_foreign(x) else x for name, x in arguments.items()}
        for name, x in arrays.items():
            if x is not None and (not isinstance(x, DeviceArray) or len(x.shape) != 4):
                what = f"{x.dtype} {list(x.shape)}" if isinstance(x, DeviceArray) else f"a {type(x).__name__}"
                raise ArgumentError(f"KVCache.over: {name} is {what}; pass a device array of four axes")
        for name in ("k_codes", "v_codes"):
            if arrays[name] is None:
                raise ArgumentError(
                    f"KVCache.over: {name} is missing; pass the array of codes, or of values in 16 bits"
                )
        arrays = {n: x if x is None or layout == "hnd" else x.transpose(0, 2, 1, 3) for n, x in arrays.items()}
        cache = cls.__new__(cls)
        k, v = arrays["k_codes"], arrays["v_codes"]
        formats = [format, format if format_v is None else format_v]
        _check_formats("KVCache.over", *formats)
        for name, x in dict(k_codes=k, v_codes=v).items():
            if 0 in x.shape:
                raise ArgumentError(f"KVCache.over: {name} has shape {list(x.shape)}; no size may be 0")
        per_byte = [2 if f in BLOCK_FORMATS and BLOCK_FORMATS[f].bits == 4 else 1 for f in formats]
        dims = [x.shape[3] * count for x, count in zip((k, v), per_byte)]
        cache._describe("KVCache.over", *formats, k.shape[0], k.shape[2], k.shape[1], *dims)
        cache.k, cache.k_scales, cache.v, cache.v_scales = arrays.values()
        for (name, x), (expected, member) in zip(arrays.items(), cache._shapes().values()):
            cache._check_array(name, x, expected, member, k)
        cache._finish("KVCache.over", k.backend, k_global, v_global, k_mean, scale_rule)
        return cache

    @staticmethod
    def _check_array(name: str, x, expected, member, first) -> None:
        """Raise ArgumentError unless an array is given exactly if its format has it, with the expected shape and a
        dtype of a member format, on the device of the first array."""
        if (x is None) != (expected is None):
            what = "is missing" if x is None else f"is {x.dtype} {list(x.shape)}"
            says = "16-bit formats have no scales" if expected is None else f"pass scales {list(expected)}"
            raise ArgumentError(f"KVCache.over: {name} {what}; {says}")
        if x is None:
            return
        if tuple(x.shape) != expected or not member.holds(x.dtype):
            received = f"{name} is {x.dtype} {list(x.shape)} as [pages, heads, page_size, ..]"
            raise ArgumentError(
                f"KVCache.over: {received}; beside k_codes {list(first.shape)} it must be {member.dtype} "
                f"{list(expected)}, in the bytes of {member.name}"
            )
        if x.backend is not first.backend:
            raise ArgumentError(
                f"KVCache.over: {name} is on {x.backend.describe()}, k_codes on {first.backend.describe()}"
            )
        if x.strides[3] != x.dtype.itemsize and x.shape[3] > 1:
            raise ArgumentError(
                f"KVCache.over: {name} has strides of {list(x.strides)} bytes; its last axis must lie without gaps"
            )
        steps = [stride for size, stride in zip(x.shape[:3], x.strides) if size > 1]
        unit = 1 if name.endswith("scales") else _ALIGNMENT
        if x.address % unit or any(stride % unit or not 0 <= stride < 2**31 for stride in steps):
            raise ArgumentError(
                f"KVCache.over: {name} begins at {x.address:#x} with strides of {list(x.strides)} bytes; they must be "
                "multiples of "
                f"{unit}, from 0 on, less than 2 GiB"
            )

    def _describe(
        self, function: str, format, format_v, pages: int, page_size: int, heads: int, dim: int, dim_v: int
    ) -> None:
        """Set formats and sizes; ArgumentError for those that no kernel supports."""
        format_v = format if format_v is None else format_v
        _check_formats(function, format, format_v)
        both = {format, format_v}
        if "f16" in both and both - {"f16", "nvfp4"}:
            with_what = " and ".join(repr(one) for one in (format, format_v))
            raise ArgumentError(
                f"{function}: keys and values in {with_what} have no type that holds both; take "
                "'bf16' in place of 'f16'"
            )
        if len(both & set(_PLAIN)) == 1 and len(both) == 2 and max(dim, dim_v) > MIXED_DIM:
            raise ArgumentError(
                f"{function}: {format!r} beside {format_v!r} takes head dimensions up to {MIXED_DIM}, "
                f"{max(dim, dim_v)} came; take one format"
            )
        for name, size, one in (("dim", dim, format), ("dim_v", dim_v, format_v)):
            step = 32 if one in BLOCK_FORMATS else 8
            if size % step or size > 256:
                nearest = min(256, -(-size // step) * step)
                raise ArgumentError(
                    f"{function}: {name} is {size}; {one} takes multiples of {step} up to 256, such as {nearest}"
                )
        self.format, self.format_v = format, format_v
        self.pages, self.page_size, self.heads, self.dim, self.dim_v = pages, page_size, heads, dim, dim_v

    def _shapes(self) -> dict[str, tuple]:
        """Return the shape and format of each array; (None, None) for scales that a format does not have."""
        shapes: dict[str, tuple] = {}
        for name, format, dim in (("k", self.format, self.dim), ("v", self.format_v, self.dim_v)):
            block, rows = BLOCK_FORMATS.get(format), (self.pages, self.heads, self.page_size)
            if block is None:
                shapes[name], shapes[f"{name}_scales"] = ((*rows, dim), _PLAIN[format]), (None, None)
            else:
                shapes[name], shapes[f"{name}_scales"] = (
                    ((*rows, dim * block.bits // 8), block.element.storage),
                    ((*rows, dim // block.block), block.scale),
                )
        return shapes

    def _finish(self, function: str, backend, k_global, v_global, k_mean, scale_rule) -> None:
        """Set global scales, mean and scale rules, and allocate the claims of slots and the counters of blocks."""
        formats = dict(k=self.format, v=self.format_v)
        self.scale_rule = {name: operand_rule(format) for name, format in formats.items()}
        if scale_rule is not None:
            scaled = {name: BLOCK_FORMATS[format] for name, format in formats.items() if format in BLOCK_FORMATS}
            for block in scaled.values():
                if scale_rule not in block.rules:
                    takes = ", ".join(map(repr, block.rules))
                    raise ArgumentError(f"{function}: scale_rule is {scale_rule!r}; {block.name} takes {takes}")
            if not scaled:
                raise ArgumentError(f"{function}: scale_rule is {scale_rule!r}; {self.format} has no scales")
            self.scale_rule |= dict.fromkeys(scaled, scale_rule)
        self.k_global = self._levels(function, "k_global", k_global, backend)
        self.v_global = self._levels(function, "v_global", v_global, backend)
        self.k_mean = None
        if k_mean is not None:
            (mean,) = as_arrays(function, k_mean=k_mean)
            if (
                tuple(mean.shape) != (self.heads, self.dim)
                or format_of(mean.dtype) is None
                and mean.dtype != np.float64
            ):
                raise ArgumentError(
                    f"{function}: k_mean is {mean.dtype} {list(mean.shape)}; pass float32 [{self.heads}, {self.dim}]"
                )
            if isinstance(mean, DeviceArray):
                if mean.dtype != np.float32 or mean.backend is not backend or not mean.is_contiguous:
                    order = "" if mean.is_contiguous else f" with strides of {list(mean.strides)} bytes"
                    received = f"{mean.dtype}{order} on {mean.backend.describe()}"
                    raise ArgumentError(
                        f"{function}: k_mean is {received}; pass float32 in row-major order on {backend.describe()}"
                    )
                self.k_mean = mean
            else:
                with np.errstate(over="ignore"):
                    mean = np.asarray(mean, np.float32)
                if not np.isfinite(mean).all():
                    raise ArgumentError(
                        f"{function}: k_mean has values that are not finite in float32; pass finite ones"
                    )
                self.k_mean = upload(backend, mean)
        self._claims = empty((self.pages * self.page_size,), np.int32, device=backend.ordinal)
        _reset_claims(self._claims)
        arrivals = empty((ARRIVALS,), np.float32, device=backend.ordinal)
        fill_f32(x=arrivals, value=0.0)
        self._arrivals = arrivals.view(np.int32)
        for array in (self._claims, arrivals):
            backend.restore_after_faults(array.memory)
        given = [(name, x) for name, x in self.arrays.items() if x is not None]
        pairs = (f"{a} and {b}" for (a, x), (b, y) in itertools.combinations(given, 2) if share_memory(x, y))
        self._shared = next(pairs, None)  # two arrays that share memory

    def _levels(self, function: str, name: str, value, backend) -> DeviceArray | None:
        """Return the global scales of the heads, float32 [heads] on the device; None if all are 1."""
        (level,) = as_arrays(function, **{name: value})
        if tuple(level.shape) not in ((), (1,), (self.heads,)) or level.dtype.kind not in "fiu":
            raise ArgumentError(
                f"{function}: {name} is {level.dtype} {list(level.shape)}; pass a number, or one for each of "
                f"{self.heads} heads"
            )
        if isinstance(level, DeviceArray):
            if level.dtype != np.float32 or level.backend is not backend:
                received = f"{level.dtype} {list(level.shape)} on {level.backend.describe()}"
                raise ArgumentError(f"{function}: {name} is {received}; pass float32 on {backend.describe()}")
            return level.broadcast_to((self.heads,)).copy()
        with np.errstate(over="ignore"):
            level = np.broadcast_to(np.asarray(level, np.float32).reshape(-1), (self.heads,))
        if not (np.isfinite(level) & (level > 0)).all():
            raise ArgumentError(f"{function}: {name} is {value!r}; pass positive finite numbers")
        return None if (level == 1).all() else upload(backend, level)

    @property
    def backend(self):
        """The device that the cache is on."""
        return self.k.backend

    @property
    def arrays(self) -> dict[str, DeviceArray | None]:
        """The arrays of the cache by name."""
        return dict(k=self.k, k_scales=self.k_scales, v=self.v, v_scales=self.v_scales)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in self.arrays.values() if x is not None)

    def arrivals(self, rows: tuple[int, int, int, int]) -> DeviceArray | None:
        """The counters of `attention_few` for rows of queries, int32, all 0 between launches; None if there are more
        rows than counters.

        Launches change them, so that calls that need them run one after another, in whatever streams.
        """
        count = math.prod(rows)
        return self._arrivals[:count].reshape(rows) if count <= ARRIVALS else None

    def multiplied(self, dtype) -> Format:
        """The 16-bit format in which queries of a dtype are multiplied with this cache."""
        formats = {self.format, self.format_v}
        plain = next((_PLAIN[format] for format in formats if format in _PLAIN), None)
        return plain or (f16 if dtype == np.float16 and formats == {"nvfp4"} else bf16)

    def __copy__(self) -> KVCache:
        same = object.__new__(KVCache)
        same.__dict__.update(self.__dict__)
        return same

    def __reduce__(self) -> Any:
        refuse_pickle(self, "save its arrays, and make a cache `over` them")

    def __repr__(self) -> str:
        dims = f"{self.dim}" + (f" and {self.dim_v}" if self.dim_v != self.dim else "")
        sizes = f"{self.pages} pages of {self.page_size} tokens, {self.heads} heads of {dims}"
        formats = self.format if self.format_v == self.format else f"{self.format} and {self.format_v}"
        return f"KVCache({formats}, {sizes}, {self.nbytes} bytes on {self.backend.describe()})"

    # Reading and writing

    def append(self, k: Array, v: Array, slots: WholeNumbers, *, stream: StreamLike = None) -> None:
        """Write tokens: k [tokens, heads, dim] and v [tokens, heads, dim_v] to their slots, int64 [tokens].

        A slot is page * page_size + row. Tokens whose slot is negative or past the end are skipped; of several tokens
        with the same slot the first is written. k and v are float32, float16 or bfloat16, of any strides. A row becomes
        the bytes of `quantize(row, format, scale_rule=..., global_scale=...)`; in 16 bits it is rounded to nearest,
        ties to even. For formats without a global scale, rows are divided by k_global or v_global first. Only the
        addressed rows change. Appends in one stream are ordered. Two streams, or threads, may append to different pages
        at the same time. The call does not wait, and graphs can capture it.

        Raises:
            ArgumentError: An argument is invalid; the message names it.
        """
        where = dict(k=k, v=v, slots=slots)
        where = dict(zip(where, as_arrays("append", **where)))
        tokens = where["slots"].shape[0] if len(where["slots"].shape) == 1 else None
        for name, dim in (("k", self.dim), ("v", self.dim_v)):
            x = where[name]
            if format_of(x.dtype) is None:
                raise ArgumentError(f"append: {name} is {x.dtype} {list(x.shape)}; {to_convert(name, False)}")
            if len(x.shape) != 3 or tuple(x.shape) != (tokens, self.heads, dim):
                expected = (
                    f"float32, float16 or bfloat16 [{'tokens' if tokens is None else tokens}, {self.heads}, {dim}]"
                )
                raise ArgumentError(
                    f"append: {name} is {x.dtype} {list(x.shape)}, slots {shown(where['slots'])}; pass {expected}"
                )
        is_empty_list = not hasattr(slots, "dtype") and where["slots"].size == 0  # NumPy takes it for float64
        slots = where["slots"]
        if isinstance(slots, np.ndarray) and (slots.dtype.kind in "iu" or is_empty_list):
            slots = slots.astype(np.int64)
        if tokens is None or slots.dtype != np.int64:
            raise ArgumentError(f"append: slots {shown(slots)}; pass int64, one for each token of k and v")
        self.check_appendable("append")
        if tokens == 0:
            return
        k, v, slots = (
            self._here("append", name, x, stream)
            for name, x in (("k", where["k"]), ("v", where["v"]), ("slots", slots))
        )
        for name, x in (("k", k), ("v", v), ("slots", slots)):
            if shared := overlapping(self, x):
                raise ArgumentError(
                    f"append: {name} and {shared} of the cache overlap in memory; pass a copy of {name}"
                )
        slots = with_whole_rows(slots, stream)
        sides = {}
        for name, x in (("k", k), ("v", v)):
            x = with_whole_rows(x, stream)
            side = {f"{name}_{format_of(x.dtype)}": x, f"{name}_codes": self.arrays[name]}
            format = self.format if name == "k" else self.format_v
            if format in BLOCK_FORMATS:
                side[f"{name}_scales"] = self.arrays[f"{name}_scales"]
                side[f"{name}_rule"] = BLOCK_FORMATS[format].rules.index(self.scale_rule[name])
            side[f"{name}_global"] = self.k_global if name == "k" else self.v_global
            sides.setdefault(format, {}).update(side)
        sides[self.format]["k_mean"] = self.k_mean
        with self.claimed(slots, stream) as claims:
            for format, arguments in sides.items():
                kernel, last = APPEND["bf16" if format in _PLAIN else format], format == self.format_v
                kernel(slots, claims, **arguments, release=int(last), stream=stream)

    def check_writeable(self, function: str) -> None:
        """Raise ArgumentError if an array of the cache is read-only."""
        for name, x in self.arrays.items():
            if x is not None and not x.writeable:
                received = f"{name} of the cache is read-only"
                raise ArgumentError(f"{function}: {received}; make it over memory that can be written")

    def check_appendable(self, function: str) -> None:
        """Raise ArgumentError if tokens cannot be written: an array is read-only, or two share memory."""
        self.check_writeable(function)
        if self._shared:
            raise ArgumentError(
                f"{function}: {self._shared} of the cache overlap in memory; make it over separate arrays"
            )

    @contextmanager
    def claimed(self, slots: DeviceArray, stream) -> Iterator[DeviceArray | None]:
        """Launch `claim_slots` for slots on the device and yield the claims, which the kernel that writes the tokens
        resets; None for a single token. If the body fails, all claims are reset: tokens of later calls would lose their
        slots to tokens that were not written."""
        if slots.shape[0] == 1:
            yield None
            return
        guard_recorded(self._claims, _reset_claims)
        try:
            claim_slots(slots, self._claims, stream=stream)
            yield self._claims
        except BaseException:
            _reset_claims(self._claims, stream)
            raise

    def _here(self, function: str, name: str, x, stream) -> DeviceArray:
        """Return an array on the cache's device; ArgumentError if it is on another device."""
        if not isinstance(x, DeviceArray):
            return upload(self.backend, x, stream)
        if x.backend is not self.backend:
            raise ArgumentError(
                f"{function}: {name} is on {x.backend.describe()}, the cache on "
                f"{self.backend.describe()}; bring it there"
            )
        return x

    def copy_pages(
        self,
        sources: WholeNumbers,
        targets: WholeNumbers,
        *,
        tokens: WholeNumbers | None = None,
        stream: StreamLike = None,
    ) -> None:
        """Copy pages within the cache, such as the last page of a prefix that two sequences share.

        Args:
            sources: int32 [count]. Host arrays are checked: pages exist, no page is a target twice, and no page is both
                a source and a target.
            targets: int32 [count].
            tokens: int32 [count], how many tokens of each page are copied; a host array is checked. None copies whole
                pages; for pages that are not full, the emulator reports this as a read of memory that was never
                written.
            stream: A stream of the device; None is the library's own.

        Raises:
            ArgumentError: An argument is invalid; the message names it.
        """
        pair = [
            whole_numbers("copy_pages", name, x, "one for each page")
            for name, x in (("sources", sources), ("targets", targets))
        ]
        if len(pair[0].shape) != 1 or pair[0].shape != pair[1].shape:
            raise ArgumentError(
                f"copy_pages: sources {shown(pair[0])}, targets {shown(pair[1])}; pass as many, int32 [count]"
            )
        for name, x in zip(("sources", "targets"), pair):
            if isinstance(x, np.ndarray) and x.size and not (0 <= x.min() and x.max() < self.pages):
                raise ArgumentError(f"copy_pages: {name} {shown(x)}; the cache has pages 0 to {self.pages - 1}")
        if isinstance(pair[1], np.ndarray):
            if len(set(pair[1].tolist())) != pair[1].size:
                raise ArgumentError(f"copy_pages: targets {shown(pair[1])}; a page can be a target once")
            if isinstance(pair[0], np.ndarray) and set(pair[0].tolist()) & set(pair[1].tolist()):
                raise ArgumentError(
                    f"copy_pages: sources {shown(pair[0])}, targets {shown(pair[1])}; no page can be both: copy in two "
                    "calls"
                )
        self.check_writeable("copy_pages")
        if not pair[0].shape[0]:
            return
        if tokens is not None:
            pair.append(whole_numbers("copy_pages", "tokens", tokens, "one for each page"))
            if pair[2].shape != pair[0].shape:
                raise ArgumentError(
                    f"copy_pages: tokens {shown(pair[2])}, sources {shown(pair[0])}; pass as many, int32 [count]"
                )
            if isinstance(pair[2], np.ndarray) and not (0 <= pair[2].min() and pair[2].max() <= self.page_size):
                raise ArgumentError(f"copy_pages: tokens {shown(pair[2])}; a page has 0 to {self.page_size}")
        arrays = [
            with_whole_rows(self._here("copy_pages", name, x, stream), stream)
            for name, x in zip(("sources", "targets", "tokens"), pair)
        ]
        for x in self.arrays.values():
            if x is not None:
                copy_rows(*arrays, rows=as_bytes(x), stream=stream)

    def read(
        self, block_table: Array, key_lengths: WholeNumbers, *, stream: StreamLike = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Dequantize keys and values of sequences: float32 NumPy arrays [B, heads, S, dim] and [B, heads, S, dim_v].
        The call waits.

        S is the largest of key_lengths, int32 [B]. Rows after a sequence's last key are zeros. Keys have k_mean added.
        Numbers on a device are checked, too.

        Raises:
            ArgumentError: An argument is invalid; the message names it.
        """
        named = checked_tables("read", self, block_table, key_lengths)
        on_host = (x.to_numpy(stream=stream) if isinstance(x, DeviceArray) else x for x in named)
        table, lengths = checked_tables("read", self, *on_host)
        keys = int(lengths.max(initial=0))
        found = []
        for name, level in (("k", self.k_global), ("v", self.v_global)):
            values = self._unpacked(name, table, lengths, keys, stream)
            if level is not None:
                values *= level.to_numpy(stream=stream)[:, None, None]
            if name == "k" and self.k_mean is not None:
                valid = np.arange(keys)[:, None] < lengths[:, None, None, None]
                values += np.where(valid, self.k_mean.to_numpy(stream=stream)[:, None], np.float32(0))
            found.append(values)
        return found[0], found[1]

    def _unpacked(self, name: str, table: np.ndarray, lengths: np.ndarray, keys: int, stream) -> np.ndarray:
        """Return codes times scales of K or V, float32 on the host."""
        format, dim = (self.format, self.dim) if name == "k" else (self.format_v, self.dim_v)
        if not keys or not len(lengths):
            return np.zeros((len(lengths), self.heads, keys, dim), np.float32)
        where = dict(
            block_table=upload(self.backend, table, stream), key_ends=upload(self.backend, lengths, stream), keys=keys
        )
        values = unpack_pages(as_bytes(self.arrays[name]), **where, stream=stream).to_numpy(stream=stream)
        if format in _PLAIN:
            return values.view(_PLAIN[format].dtype).astype(np.float32)
        scales = unpack_pages(as_bytes(self.arrays[f"{name}_scales"]), **where, stream=stream).to_numpy(stream=stream)
        block = BLOCK_FORMATS[format]
        return block.decode(values, scales, *([1.0] if block.two_level else []))

    @staticmethod
    def unswizzle_values(v_scales: Array) -> np.ndarray:
        """Convert the scales of V of SM100 caches to linear order: uint8 [..., tokens, D / 16], on the host.

        In these caches the bytes of four tokens are interleaved: byte i of token t of the four is byte 4 i + t of their
        four rows. tokens is a multiple of 4. Source: FlashInfer, csrc/xqa, and vLLM, reshape_and_cache_nvfp4.
        """
        (scales,) = as_arrays("unswizzle_values", v_scales=v_scales)
        if (
            not isinstance(scales, np.ndarray)
            or scales.dtype.itemsize != 1
            or scales.dtype == np.bool_
            or len(scales.shape) < 2
            or scales.shape[-2] % 4
        ):
            raise ArgumentError(
                f"unswizzle_values: v_scales is {scales.dtype} {list(scales.shape)}; pass bytes [..., tokens, D / 16] "
                "on the host, "
                "a multiple of 4 tokens"
            )
        *outer, tokens, width = scales.shape
        fours = scales.view(np.uint8).reshape(*outer, tokens // 4, 4 * width).reshape(*outer, tokens // 4, width, 4)
        return np.ascontiguousarray(np.swapaxes(fours, -1, -2)).reshape(scales.shape)


def _check_formats(function: str, format, format_v) -> None:
    """Raise ArgumentError for formats that no cache has."""
    for name, one in (("format", format), ("format_v", format_v)):
        if not isinstance(one, str) or one not in FORMATS:
            raise ArgumentError(f"{function}: {name} is {one!r}; pass one of {', '.join(map(repr, FORMATS))}")


def as_bytes(x: DeviceArray) -> DeviceArray:
    """View an array [pages, heads, page, row] as bytes."""
    strides = (*x.strides[:3], 1)
    shape = (*x.shape[:3], x.shape[3] * x.dtype.itemsize)
    return DeviceArray(x.memory, x.address, shape, np.uint8, strides, x.writeable)


def _reset_claims(claims: DeviceArray, stream=None) -> None:
    """Make all slots free."""
    fill_f32(x=claims.view(np.float32), value=float(np.int32(UNCLAIMED).view(np.float32)), stream=stream)


def share_memory(a: DeviceArray, b: DeviceArray) -> bool:
    """Return whether two arrays may share bytes: False is certain."""
    return a.backend is b.backend and Box.of(a).overlaps(Box.of(b), b.address - a.address)


def overlapping(cache: KVCache, x: DeviceArray) -> str | None:
    """Return the name of the cache's array that shares memory with x, or None."""
    held = dict(cache.arrays, k_mean=cache.k_mean, k_global=cache.k_global, v_global=cache.v_global)
    return next((name for name, mine in held.items() if mine is not None and share_memory(mine, x)), None)


def checked_tables(function: str, cache: KVCache, block_table, key_lengths) -> tuple[Any, Any]:
    """Return block_table [B, pages] and key_lengths [B], int32; ArgumentError for others, and for host lengths beyond
    the table."""
    table = whole_numbers(function, "block_table", block_table, "[B, pages of a sequence]")
    lengths = whole_numbers(function, "key_lengths", key_lengths, "one for each row of block_table")
    if len(table.shape) != 2 or tuple(lengths.shape) != tuple(table.shape[:1]):
        raise ArgumentError(
            f"{function}: block_table {shown(table)}, key_lengths {shown(lengths)}; pass [B, pages "
            "of a sequence] and [B]"
        )
    room = table.shape[1] * cache.page_size
    if isinstance(lengths, np.ndarray) and lengths.size:
        if lengths.min() < 0 or lengths.max() > room:
            raise ArgumentError(
                f"{function}: key_lengths {shown(lengths)}; {table.shape[1]} pages of {cache.page_size} "
                f"tokens hold 0 to {room}"
            )
        if isinstance(table, np.ndarray):
            used = table[np.arange(table.shape[1]) * cache.page_size < lengths[:, None]]
            if used.size and not (0 <= used.min() and used.max() < cache.pages):
                raise ArgumentError(
                    f"{function}: block_table names page {used.min() if used.min() < 0 else used.max()}; the cache "
                    f"has {cache.pages}"
                )
    return table, lengths


def block_table_from_csr(indptr: WholeNumbers, indices: WholeNumbers) -> np.ndarray:
    """Make a block table from page lists in CSR form: int32 [B, the most pages of a sequence], -1 behind the last page.

    Args:
        indptr: B + 1 whole numbers that do not fall, the first of them at least 0: sequence b has the pages
            indices[indptr[b]] to indices[indptr[b + 1]]. Arrays of the host, like indices.
        indices: Page numbers.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    named = dict(indptr=indptr, indices=indices)
    starts, pages = (whole_numbers("block_table_from_csr", name, x, "as lists of pages") for name, x in named.items())
    for name, x in zip(named, (starts, pages)):
        if isinstance(x, DeviceArray):
            raise ArgumentError(f"block_table_from_csr: {name} is on {x.backend.describe()}; pass {name}.to_numpy()")
    if (
        len(starts.shape) != 1
        or not len(starts)
        or starts[0] < 0
        or (np.diff(starts) < 0).any()
        or starts[-1] > pages.size
        or len(pages.shape) != 1
    ):
        raise ArgumentError(
            f"block_table_from_csr: indptr {shown(starts)} with {list(pages.shape)} indices; pass numbers that rise "
            "to at most that many"
        )
    if pages.min(initial=0) < 0:
        raise ArgumentError(f"block_table_from_csr: indices has page {pages.min()}; pages are numbers from 0 on")
    counts = np.diff(starts)
    table = np.full((len(counts), counts.max(initial=0)), -1, np.int32)
    valid = np.arange(table.shape[1]) < counts[:, None]
    table[valid] = pages[starts[0] : starts[-1]]
    return table


@overload
def slots_of(
    block_table: HostArray,
    sequence_ids: WholeNumbers,
    positions: WholeNumbers,
    page_size: int,
    *,
    stream: StreamLike = ...,
) -> HostArray: ...
@overload
def slots_of(
    block_table: DeviceArray,
    sequence_ids: WholeNumbers,
    positions: WholeNumbers,
    page_size: int,
    *,
    stream: StreamLike = ...,
) -> DeviceArray: ...
@overload
def slots_of(
    block_table: Array, sequence_ids: WholeNumbers, positions: WholeNumbers, page_size: int, *, stream: StreamLike = ...
) -> Any: ...
def slots_of(
    block_table: Array,
    sequence_ids: WholeNumbers,
    positions: WholeNumbers,
    page_size: int,
    *,
    stream: StreamLike = None,
) -> Any:
    """Find the slots of tokens, int64 [tokens], for `KVCache.append`.

    Position p of sequence s is row p % page_size of page block_table[s, p // page_size]. NumPy arrays give NumPy
    arrays. Device arrays stay on the device; the call does not wait.

    Args:
        block_table: int32 [B, pages of a sequence].
        sequence_ids: int32 [tokens].
        positions: int32 [tokens]. A token whose sequence or position is outside the table gets slot -1, which `append`
            skips.
        page_size: Tokens of a page.
        stream: A stream of the device; None is the library's own.

    Raises:
        ArgumentError: An argument is invalid; the message names it.
    """
    named = dict(block_table=block_table, sequence_ids=sequence_ids, positions=positions)
    table, ids, places = (
        whole_numbers("slots_of", name, x, "as [B, pages], [tokens] and [tokens]") for name, x in named.items()
    )
    if len(table.shape) != 2 or len(ids.shape) != 1 or tuple(ids.shape) != tuple(places.shape):
        raise ArgumentError(
            f"slots_of: block_table {shown(table)}, sequence_ids {shown(ids)}, positions {shown(places)}; pass [B, "
            "pages], [tokens], [tokens]"
        )
    if not isinstance(page_size, (int, np.integer)) or isinstance(page_size, bool) or page_size < 1:
        raise ArgumentError(f"slots_of: page_size is {page_size!r}; pass a whole number of at least 1")
    if page_size >= 2**31:
        raise ArgumentError(f"slots_of: page_size is {page_size}; pass less than 2^31")
    arrays: tuple[Any, ...] = (table, ids, places)
    beside = next((x for x in arrays if isinstance(x, DeviceArray)), None)
    if 0 in table.shape:  # no position is in the table
        return _slots_outside(ids.shape[0], beside, stream)
    if beside is not None:
        for name, x in zip(named, arrays):
            if isinstance(x, DeviceArray) and x.backend is not beside.backend:
                other = next(name for name, x in zip(named, arrays) if x is beside)
                where = f"{name} is on {x.backend.describe()}, {other} on {beside.backend.describe()}"
                raise ArgumentError(f"slots_of: {where}; pass all on one device")
        arrays = tuple(
            with_whole_rows(x, stream) if isinstance(x, DeviceArray) else upload(beside.backend, x, stream)
            for x in arrays
        )
    return find_slots(*arrays, page=int(page_size), stream=stream)


def _slots_outside(tokens: int, beside: DeviceArray | None, stream):
    """Return as many slots of -1, on the host, or on the device of an array."""
    slots = np.full(tokens, -1, np.int64)
    return slots if beside is None else upload(beside.backend, slots, stream)
