"""Recorded calls: a call that is like an earlier one repeats its launches and does not run the function.

One mechanism serves three callers: `prepare`, functions marked `@remembered`, and kernels.

1. `_key` returns what the launches of a call depend on: the function, the signatures of the device arrays, plain
   values. Calls with equal keys are alike. `prepare` has no key: it compares each call with its example.
2. `Recording` runs the function once with a recorder in the scope. Nothing is launched. Each launch is kept as a Plan
   with the origin of its arrays: an argument (over memory that knows its argument, `_Lent`), memory that the call
   allocates (`_Own`), or a fixed array. The result is kept in the same way.
   A function may decide by memory: a product that writes to its residual reads it there. `Recording.relation` is
   therefore how each array that is written lies to the others, and later calls are alike only if theirs do.
3. `_Writer` writes the recording as a Python function, which `exec` compiles. Loops over launches, arrays and numbers
   are unrolled, because a step of a loop costs several percent of a launch. If a call needs anything else (a wait for
   another stream, a graph capture, a trace), that function does nothing, and `Recording.run` launches plan by plan with
   full checks.

A call is recorded at its second occurrence. Records belong to the device's backend (`Backend.remembered`); the oldest
is dropped when there are too many. `ptxrt bench launch` measures what this saves.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial, wraps
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import numpy as np

from . import launch
from .array import Borrowed, DeviceArray, Memory, _as_array, changes, is_foreign, new_memory
from .backend import Packet, Queue, Remembered, _scope, enter, leave
from .declaration import Declaration
from .errors import ArgumentError, PtxError
from .formats import bf16
from .launch import Launch, Plan

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Prepared(Protocol[R]):
    """The result of `prepare`: a function whose arguments default to those of the example. launches: the receipts."""

    launches: tuple[Launch, ...]

    def __call__(self, *arguments: Any, stream: Any = ..., **named: Any) -> R: ...


def prepare(op: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> Prepared[R]:
    """Prepare `op(*arguments, **named)`: any kernel, function of this package, or function made of them.

        prepared = ptxrt.prepare(ptxrt.quantize, x, "mxfp4", out=q)
        prepared(x, "mxfp4", out=q)                # or another x and q of the same shapes and dtypes
        prepared(x)                                # arguments that are left out are those of the example

    `prepare` launches nothing. The example's arrays are device arrays, or another library's. A prepared call does
    nothing but its launches. It returns what `op` returns and also takes `stream=`. Memory that the call works in, and
    results without `out`, are allocated once and used by every call, so that each call overwrites the results of the
    call before. Numbers of a kernel may differ from call to call; everything else must be like the example, also which
    arguments share memory with one that is written (`out=residual`).
    `prepared.launches` are the receipts.

    Raises:
        ArgumentError: `op` waits for the device or copies, which cannot be prepared; or a call is unlike the example.
    """
    return _prepared(Recording(op, arguments, named, keep=True))


class _Lent(Borrowed):
    """An argument's memory while a call is recorded. leaf: the number of the array among those of the arguments."""

    __slots__ = ("leaf",)

    def __init__(self, array: DeviceArray, leaf: int):
        super().__init__(array.backend, array.address, array.memory.nbytes, array, None)
        self.leaf = leaf


class _Own(Borrowed):
    """Memory that a recorded call allocates: a unique address without bytes behind it."""

    __slots__ = ()
    FIRST, GAP = 1 << 60, 512


class _Part:
    """The memory and the address of an array, which are all that a launch needs of it."""

    __slots__ = ("address", "memory")

    def __init__(self, memory: Memory, address: int):
        self.memory, self.address = memory, address


class _Recorder:
    """A receiver of the launches of one call, in place of the machine.

    keep: whether memory that the call allocates belongs to the recording, or is new in each call.
    """

    name = "ptxrt.prepare"

    def __init__(self, keep: bool):
        self.keep = keep
        self.steps: list[tuple[Plan, tuple, tuple]] = []
        self.own: list[_Own] = []
        self.guards: list[tuple[DeviceArray, Callable[..., None]]] = []
        self.noted: list[tuple[DeviceArray, DeviceArray]] = []
        self._next = _Own.FIRST

    def add(self, plan: Plan, packet: Packet, arrays: Sequence[DeviceArray], values: tuple, queue: Queue) -> None:
        plan.keep(packet)
        self.steps.append((plan, tuple(arrays), values))

    def note(self, written: DeviceArray, read: DeviceArray) -> None:
        """Keep that the launches depend on how two arrays lie to each other, of which one may be in no launch."""
        self.noted.append((written, read))

    def guard(self, array: DeviceArray, restore: Callable[..., None]) -> None:
        """Keep what restores an array if the launches are not made to the end."""
        self.guards.append((array, restore))

    def new_memory(self, backend: Any, nbytes: int, queue: Queue) -> Memory:
        if self.keep:
            return new_memory(backend, nbytes, queue)
        memory = _Own(backend, self._next, nbytes, None, None)
        self._next += -(-nbytes // _Own.GAP) * _Own.GAP + _Own.GAP
        self.own.append(memory)
        return memory


class _Argument:
    """One argument: its name, the arrays in it, and their signatures.

    places: where the arrays are: names of attributes of an object, positions in a list or tuple, (None,) for an array
    itself, empty for a fixed value. rest: all other parts, as they were when the call was recorded. number: the
    position, among the launch's numbers, of a kernel's number that may differ from call to call; None for all others.
    """

    __slots__ = ("label", "value", "places", "rest", "first", "signatures", "number")

    def __init__(self, label: str, value: Any, leaves: list[DeviceArray]):
        self.label, self.value, self.first, self.number = label, value, len(leaves), None
        self.places: tuple[Any, ...] = ()
        if is_array(value):
            self.value = value = _as_array("prepare", label, value)
            if not isinstance(value, DeviceArray):
                raise ArgumentError(
                    f"prepare: {label} is a NumPy array; prepared calls take device arrays, see ptxrt.to_device"
                )
            self.places = (None,)
        else:
            self.places = tuple(place for place, item in _parts(value).items() if isinstance(item, DeviceArray))
        leaves += [_part(value, place) for place in self.places]
        self.rest = self._rest(value) if self.places else _kept(value)
        self.signatures = tuple(leaf.signature for leaf in leaves[self.first :])

    def _rest(self, value: Any) -> Any:
        return {place: _kept(item) for place, item in _parts(value).items() if place not in self.places}

    @property
    def may_change(self) -> bool:
        """Whether parts that are no arrays may change while the object stays the same. This package's objects keep
        theirs."""
        if self.places == (None,) or type(self.value).__module__.partition(".")[0] == __package__:
            return False
        return bool(self.places) or self.rest is not self.value

    def is_like(self, value: Any) -> bool:
        """Return whether the parts of a value that are no arrays are those that were recorded."""
        if not self.places:
            return _is_kept(self.rest, value)
        parts = _parts(value)
        return len(parts) == len(self.rest) + len(self.places) and all(
            place in parts and _is_kept(kept, parts[place]) for place, kept in self.rest.items()
        )

    def lent(self, leaves: Sequence[DeviceArray]) -> Any:
        """Return the argument with `_Lent` memory, by which the recording recognizes its arrays."""
        arrays = [
            DeviceArray(_Lent(leaf, self.first + i), leaf.address, leaf.shape, leaf.dtype, leaf.strides, leaf.writeable)
            for i, leaf in enumerate(leaves[self.first : self.first + len(self.places)])
        ]
        if self.places == (None,):
            return arrays[0]
        if not self.places:
            return self.value
        if type(self.value) in (list, tuple):
            parts = _parts(self.value) | dict(zip(self.places, arrays))
            return type(self.value)(parts.values())
        lent = copy.copy(self.value)
        for name, array in zip(self.places, arrays):
            setattr(lent, name, array)
        return lent

    def put(self, value: Any, leaves: list) -> None:
        """Store the arrays of an argument in `leaves`; ArgumentError unless it is like the example."""
        if not self.places:
            if not self.is_like(value):
                changed = (
                    ", which has changed since" if value is self.value else f"; it was prepared with {self.value!r}"
                )
                raise ArgumentError(f"prepared: {self.label} is {value!r}{changed}. Prepare another call for it.")
            return
        if self.places == (None,):
            arrays = [_as_array("prepared", self.label, value)] if is_array(value) else [value]
        else:
            if type(value) is not type(self.value):
                raise ArgumentError(
                    f"prepared: {self.label} is a {type(value).__name__}; "
                    f"pass a {type(self.value).__name__} as in the example"
                )
            parts = _parts(value)
            arrays = [parts.get(place) for place in self.places]
            other = [place for place, array in zip(self.places, arrays) if not isinstance(array, DeviceArray)]
            if other or not self.is_like(value):
                other += [
                    place
                    for place in {**self.rest, **parts}
                    if place not in self.places
                    if place not in parts or place not in self.rest or not _is_kept(self.rest[place], parts[place])
                ]
                names = [f"item {place}" if isinstance(place, int) else place.lstrip("_") for place in other]
                raise ArgumentError(
                    f"prepared: {self.label} is {value!r}; it was prepared with {self.value!r}, and {', '.join(names)} "
                    f"{'differs' if len(names) == 1 else 'differ'}. Prepare another call for it."
                )
        for i, (array, signature) in enumerate(zip(arrays, self.signatures)):
            if not isinstance(array, DeviceArray):
                raise ArgumentError(f"prepared: {self.label} is a {type(array).__name__}; pass a device array")
            same = array.backend is signature.backend and str(array.signature) == str(signature)
            if array.signature is not signature and not same:
                raise ArgumentError(
                    f"prepared: {self.label} is {array.signature}; it was prepared with {signature}. "
                    "Prepare another call for it."
                )
            leaves[self.first + i] = array


def _parts(value: Any) -> dict[Any, Any]:
    """Return the items of a list or tuple by position, or the attributes of an object by name."""
    return dict(enumerate(value)) if type(value) in (list, tuple) else getattr(value, "__dict__", {})


def _part(value: Any, place: Any) -> Any:
    """Return the part of a value at a place of `_Argument.places`."""
    return value if place is None else value[place] if isinstance(place, int) else getattr(value, place)


def _in_code(label: str, place: Any) -> str:
    """Return the expression of that part of the value that `label` names."""
    return label if place is None else f"{label}[{place}]" if isinstance(place, int) else f"{label}.{place}"


class _Kept:
    """A list, tuple, dictionary, set or NumPy array as it was."""

    __slots__ = ("kind", "content")

    def __init__(self, value: Any, within: tuple[Any, ...]):
        self.kind = type(value)
        within = (*within, value)
        if isinstance(value, dict):
            self.content: Any = {key: _kept(item, within) for key, item in value.items()}
        elif isinstance(value, (list, tuple)):
            self.content = [_kept(item, within) for item in value]
        else:
            self.content = value.copy()

    def is_like(self, value: Any) -> bool:
        if type(value) is not self.kind:
            return False
        if isinstance(value, dict):
            return value.keys() == self.content.keys() and all(
                _is_kept(item, value[key]) for key, item in self.content.items()
            )
        if isinstance(value, (list, tuple)):
            return len(value) == len(self.content) and all(map(_is_kept, self.content, value))
        if isinstance(value, np.ndarray):
            return (
                value.dtype == self.content.dtype and value.shape == self.content.shape and _same(value, self.content)
            )
        return _equal(value, self.content)


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether two arrays of one shape and dtype have the same bytes, or the same objects."""
    if x.dtype.hasobject:
        return all(map(operator.is_, x.ravel(), y.ravel()))
    x, y = (np.ascontiguousarray(z).reshape(-1).view(np.uint8) for z in (x, y))
    return bool((x == y).all())


def _kept(value: Any, within: tuple[Any, ...] = ()) -> Any:
    """Return a value that a later change of it does not change. Objects other than containers, and containers within
    themselves, are kept as they are."""
    if any(value is outer for outer in within):
        return value
    if isinstance(value, (dict, list, tuple)):
        kept = _Kept(value, within)
        items = kept.content.values() if isinstance(value, dict) else kept.content
        return value if type(value) is tuple and all(map(operator.is_, items, value)) else kept
    return _Kept(value, within) if isinstance(value, (set, bytearray, np.ndarray)) else value


def _is_kept(kept: Any, value: Any) -> bool:
    if isinstance(kept, _Kept):
        return kept.is_like(value)
    return value is kept or (type(value) is type(kept) and not isinstance(kept, DeviceArray) and _equal(value, kept))


def note_shared(written: DeviceArray, read: DeviceArray) -> None:
    """Tell a recorder that a function has found `read` in the memory of `written`, and uses `written` alone."""
    recorder = _scope.get().recorder
    if isinstance(recorder, _Recorder):
        recorder.note(written, read)


def guard_recorded(array: DeviceArray, restore: Callable[..., None]) -> None:
    """Tell a recorder that `restore(array, stream)` must follow launches that fail before the last one."""
    recorder = _scope.get().recorder
    if isinstance(recorder, _Recorder):
        recorder.guard(array, restore)


def _are_lent(arrays: Sequence[DeviceArray]) -> bool:
    return all(isinstance(array.memory, _Lent) for array in arrays)


def _distance(x: Any, y: Any) -> int | None:
    """Return the bytes from x to y if they may share memory, else None."""
    if x.memory is not y.memory and x.memory.is_owned and y.memory.is_owned:
        return None
    distance = y.address - x.address
    return distance if x.signature.box.overlaps(y.signature.box, distance) else None


def is_array(value: Any) -> bool:
    """Return whether a value is one array, of this or another library."""
    return isinstance(value, (DeviceArray, np.ndarray)) or (is_foreign(value) and not isinstance(value, np.generic))


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (TypeError, ValueError, RecursionError):
        return False


class _Unlike:
    """The relation of a call's arrays (`Recording.relation`) where it is not that of the record."""

    __slots__ = ("relation",)

    def __init__(self, relation: tuple):
        self.relation = relation


class Recording:
    """The launches of a call, the memory that they use, and the result of the call.

    arguments: in order. leaves: the example's arrays. steps: for each launch the plan, a place for each array, and the
    numbers. A place is (leaf, offset), (~own, offset) or a fixed array. own: the sizes of memory to allocate. assigned:
    what the function stores in its arguments: (argument, place, tree). result: a tree. pairs: (leaf that a launch
    writes, another leaf), and pairs by which the function decided. relation: for each pair the bytes from the one to
    the other, None if they share no memory. fixed: (leaf, offset, address) of leaves that must be at an address,
    because a fixed array is there.
    """

    def __init__(self, op: Callable, arguments: tuple, named: dict[str, Any], keep: bool):
        self.name = getattr(op, "name", None) or getattr(op, "__name__", repr(op))
        named = dict(named)
        stream = named.pop("stream", None)
        self.positional, self.names = len(arguments), tuple(named)
        if not all(name.isidentifier() and not iskeyword(name) for name in named):
            raise ArgumentError(
                f"prepare: {self.name} was given {sorted(named)}, of which not all are names of arguments"
            )
        self.leaves: list[DeviceArray] = []
        self.arguments = [_Argument(f"argument {i}", value, self.leaves) for i, value in enumerate(arguments)]
        self.arguments += [_Argument(name, value, self.leaves) for name, value in named.items()]
        if not self.leaves:
            raise ArgumentError(
                f"prepare: no argument of {self.name} is a device array, an object with some, or a list or tuple with "
                "some; see ptxrt.to_device"
            )
        lent = [argument.lent(self.leaves) for argument in self.arguments]
        recorder = _Recorder(keep)
        before = enter(recorder=recorder)
        try:
            on_stream = {} if stream is None else {"stream": stream}
            result = op(*lent[: len(arguments)], **dict(zip(named, lent[len(arguments) :])), **on_stream)
        finally:
            leave(before, "recorder")
        self._places: dict[Memory, int] = {memory: i for i, memory in enumerate(recorder.own)}
        self.own = [memory.nbytes for memory in recorder.own]
        self.steps = [
            (plan, [self._place(array) for array in arrays], values) for plan, arrays, values in recorder.steps
        ]
        backends = {plan.backend for plan, _, _ in self.steps} or {self.leaves[0].backend}
        if len(backends) > 1:
            devices = ", ".join(backend.describe() for backend in backends)
            raise ArgumentError(f"prepare: {self.name} runs on several devices: {devices}; prepare a call for each")
        (self.backend,) = backends
        self.guards = [(self._place(array), array.signature, restore) for array, restore in recorder.guards]
        self.pairs = self._pairs(recorder)
        self.relation = self.relation_of(self.leaves)
        self.fixed = self._fixed(recorder)
        if isinstance(getattr(op, "__self__", op), Declaration):
            self._find_numbers()
        self.assigned = self._assignments(lent)
        self.result = self._tree(result, lent)
        self.is_new = self._is_new()
        self._write()
        del self._places
        if not keep:  # a record outlives the call and must not hold its arrays
            self.leaves, self.result, self.assigned = [], (), []
            for argument in self.arguments:
                argument.value = argument.rest = None

    def _place(self, array: Any) -> Any:
        memory = array.memory
        if isinstance(memory, _Lent):
            return memory.leaf, array.address - memory.owner.address
        if isinstance(memory, _Own):
            return ~self._places[memory], array.address - memory.address
        return array

    def _pairs(self, recorder: _Recorder) -> list[tuple[int, int]]:
        """Find the pairs of leaves whose common memory a launch may change, or by which the function decided."""
        written = {
            place[0]
            for plan, places, _ in self.steps
            for place, write in zip(places, plan.writes)
            if write and type(place) is tuple and place[0] >= 0
        }
        pairs = [
            (one, other)
            for one in sorted(written)
            for other, leaf in enumerate(self.leaves)
            if other != one and not (other in written and other < one)
            if leaf.backend is self.leaves[one].backend and leaf.nbytes and self.leaves[one].nbytes
        ]
        noted = [tuple(array.memory.leaf for array in pair) for pair in recorder.noted if _are_lent(pair)]
        return pairs + [pair for pair in noted if pair not in pairs and pair[::-1] not in pairs]

    def _fixed(self, recorder: _Recorder) -> list[tuple[int, int, int]]:
        """Find the arguments that must lie where a fixed array does, as they did when the call was recorded."""
        found = []
        for pair in recorder.noted:
            one, other = map(self._place, pair)
            if type(one) is not type(other):  # of two arguments the relation is known
                (leaf, offset), array = (one, other) if type(one) is tuple else (other, one)
                if leaf >= 0:
                    found.append((leaf, offset, array.address))
        return found

    def relation_of(self, leaves: Sequence[DeviceArray]) -> tuple:
        """Return the relation of a call's arrays."""
        return tuple([_distance(leaves[one], leaves[other]) for one, other in self.pairs])

    def unlike(self, leaves: Sequence[DeviceArray]) -> _Unlike | None:
        """Return None if a call's arrays lie to each other as those did that were recorded."""
        relation = self.relation_of(leaves)
        if relation == self.relation and all(leaves[i].address + at == address for i, at, address in self.fixed):
            return None
        return _Unlike(relation)

    def _find_numbers(self) -> None:
        """Find the numbers of a kernel's launch that a call may change."""
        for argument in self.arguments:
            for plan, _, _ in self.steps:
                for i, scalar in enumerate(plan.scalars):
                    if argument.label == scalar.name:
                        argument.number = i

    def _assignments(self, lent: list) -> list[tuple[int, Any, tuple]]:
        """Find what the function stores in its arguments (a QuantizedArray's global scale, say); every call repeats
        it.
        """
        changed = []
        for i, (argument, value) in enumerate(zip(self.arguments, lent)):
            for j, place in enumerate(argument.places):
                item = _part(value, place)
                if place is not None and not self._is_leaf(item, argument.first + j):
                    changed.append((i, place, self._tree(item, lent)))
        return changed

    def _is_leaf(self, item: Any, leaf: int) -> bool:
        """Return whether an item is an argument's array as it was given, not a view of it."""
        if not isinstance(item, DeviceArray) or not isinstance(item.memory, _Lent) or item.memory.leaf != leaf:
            return False
        return item.signature is self.leaves[leaf].signature and item.address == self.leaves[leaf].address

    def _tree(self, item: Any, lent: list) -> tuple:
        """Return the tree that rebuilds a part of the result: ("given", argument), ("leaf", leaf), ("view", place,
        array), ("made", kind, {name: tree}), ("sequence", kind, [tree]), ("dict", {key: tree}) or ("same", item)."""
        for i, value in enumerate(lent):
            if item is value and self.arguments[i].places:
                return "given", i
        if isinstance(item, DeviceArray):
            place = self._place(item)
            if place is item:
                return "same", item
            return ("leaf", place[0]) if place[0] >= 0 and self._is_leaf(item, place[0]) else ("view", place, item)
        if type(item) in (tuple, list):
            return "sequence", type(item), [self._tree(part, lent) for part in item]
        if type(item) is dict:
            return "dict", {key: self._tree(part, lent) for key, part in item.items()}
        fields = getattr(item, "__dict__", {})
        if any(isinstance(part, DeviceArray) for part in fields.values()):
            return "made", type(item), {name: self._tree(part, lent) for name, part in fields.items()}
        return "same", item

    def _is_new(self) -> bool:
        """Return whether the result of each call shares no mutable object with the result of another call."""
        return (
            not self.assigned
            and not self.fixed
            and _is_new(self.result)
            and not any(isinstance(p, DeviceArray) for _, places, _ in self.steps for p in places)
        )

    def _write(self) -> None:
        """Write the functions that repeat the call.

        `replay(given, leaves, queue, recorder)` is for remembered calls; `_prepared` puts the lines into its own
        function.
        """
        self.writer = writer = _Writer(self)
        writer.known.update(_run=self.run, _unlike=self.unlike, _restore=self.restore)
        lines = [
            "def replay(given, leaves, _queue, recorder):",
            *([f"    {writer.leaf_names}= leaves"] if self.leaves else []),
            *([f"    {writer.given_names}= given"] if self.arguments else []),
            "    if recorder is None and not _observers:",
            *(f"        {line}" for line in writer.lines()),
            "    return _unlike(leaves) or _run(given, leaves, _queue, recorder)",
            "def result(given, leaves, own):",
            f"    {writer.leaf_names}= leaves",
            *([f"    {writer.given_names}= given"] if self.arguments else []),
            *([f"    {writer.own_names}= own"] if self.own else []),
            *writer.assigning("    "),
            f"    return {writer.expression(self.result)}",
        ]
        exec("\n".join(lines), writer.known)
        self.replay, self._result = writer.known["replay"], writer.known["result"]

    def run(self, arguments: Sequence[Any], leaves: Sequence[DeviceArray], queue: Queue, recorder: Any) -> Any:
        """Run the call with full checks, launch by launch. Each launch waits for what it depends on; a recorder takes
        it instead of the machine.
        """
        make = new_memory if recorder is None else recorder.new_memory
        own = [make(self.backend, nbytes, queue) for nbytes in self.own]
        if isinstance(recorder, _Recorder):
            for (one, other), distance in zip(self.pairs, self.relation):
                if distance is not None:
                    recorder.note(leaves[one], leaves[other])
            for array, restore in self._guarded(leaves, own):
                recorder.guard(array, restore)
        numbers = [
            (argument.number, value)
            for argument, value in zip(self.arguments, arguments)
            if argument.number is not None
        ]
        try:
            for plan, places, values in self.steps:
                arrays = []
                for place in places:
                    if type(place) is not tuple:
                        arrays.append(place)
                        continue
                    which, offset = place
                    source = leaves[which] if which >= 0 else own[~which]
                    arrays.append(_Part(source.memory if which >= 0 else source, source.address + offset))
                if numbers:
                    values = list(values)
                    for i, value in numbers:
                        values[i] = value
                plan.check_overlap(arrays)
                plan.launch(arrays, tuple(values), queue, recorder)
        except BaseException:
            if recorder is None:
                self.restore(leaves, own, queue)
            raise
        return self._result(arguments, leaves, own)

    def _guarded(self, leaves: Sequence[DeviceArray], own: Sequence[Memory]) -> Iterator[tuple[DeviceArray, Callable]]:
        """Return the arrays of a call that `restore` restores."""
        for place, of, restore in self.guards:
            if type(place) is tuple:
                which, offset = place
                memory = leaves[which].memory if which >= 0 else own[~which]
                address = (leaves[which] if which >= 0 else memory).address + offset
                place = DeviceArray(memory, address, of.shape, of.dtype, of.strides, of.writeable)
            yield place, restore

    def restore(self, leaves: Sequence[DeviceArray], own: Sequence[Memory], queue: Queue) -> None:
        """Restore what launches change for the time of the call, after a failure between them."""
        for array, restore in self._guarded(leaves, own):
            restore(array, queue)


_IMMUTABLE = (int, float, complex, str, bytes, type(None), type, np.dtype, np.generic)


def _is_new(tree: tuple) -> bool:
    """Return whether a tree describes an object that is new in each call, an argument, or immutable."""
    kind = tree[0]
    if kind == "sequence":
        return all(map(_is_new, tree[2]))
    if kind in ("made", "dict"):
        return all(map(_is_new, tree[-1].values()))
    return kind != "same" or isinstance(tree[1], _IMMUTABLE) or _is_frozen(type(tree[1]))


def _made(kind: type, fields: dict[str, Any]) -> Any:
    """Make an object with these fields. The constructor is skipped: its checks passed when the call was recorded."""
    made = kind.__new__(kind)
    made.__dict__.update(fields)
    return made


class _Writer:
    """A writer of recordings as Python. `known`: the objects that its lines name.

    _gI is an argument, _aI and _mI an argument's array and its memory, _wI memory that the call allocates, _q a
    launch's packet. Names begin with _ so that none is an argument's name.
    """

    def __init__(self, recording: Recording):
        self.recording = recording
        self.known: dict[str, Any] = dict(
            _observers=launch.observers, _remember=launch._launches.append, _made=_made, _array=DeviceArray,
            _of=DeviceArray.of, _memory=Memory, _backend=recording.backend, _alloc=recording.backend.alloc,
        )  # fmt: skip
        self.leaf_names = "".join(f"_a{i}, " for i in range(len(recording.leaves)))
        self.given_names = "".join(f"_g{i}, " for i in range(len(recording.arguments)))
        self.own_names = "".join(f"_w{i}, " for i in range(len(recording.own)))

    def name(self, item: Any) -> str:
        """A name for an object."""
        name = f"_k{len(self.known)}"
        self.known[name] = item
        return name

    def lines(self, passed: Sequence[str] = ()) -> list[str]:
        """Return lines that launch in `_queue` and return, if the call depends on nothing in another queue; else they
        do nothing. passed: lines to run once the tests have passed.
        """
        steps = self.recording.steps
        memories: dict[str, str] = {}  # the name of a memory -> its expression
        written, pairs = set(), set()
        for plan, places, _ in steps:
            names = [self._memory_of(place, memories) for place in places]
            written |= {name for name, write in zip(names, plan.writes) if write}
            pairs |= {(names[i], names[j]) for i, j in plan.pairs if names[i] != names[j]}
        tests = [
            f"{name}.writer is _queue" + (f" and not {name}.readers" if name in written else "") for name in memories
        ]
        checked = [(one, other) for one, other in sorted(pairs) if one in memories and other in memories]
        tests += [f"{one} is not {other}" for one, other in checked]
        # Owned memory overlaps with no other memory. Borrowed memory may: `Recording.run` compares the addresses.
        owned = {name for pair in checked for name in pair}
        for (i, j), distance in zip(self.recording.pairs, self.recording.relation):
            one, other = (name if name in memories else f"_a{name[2:]}.memory" for name in (f"_m{i}", f"_m{j}"))
            if distance is not None:
                between = f" - _a{i}.address == {distance}" if distance else f" == _a{i}.address"
                tests.append(f"_a{j}.address{between}")
            elif (one, other) not in checked and (other, one) not in checked:
                tests.append(f"{one} is not {other}")
                owned |= {one, other}
        tests += [f"_a{leaf}.address + {offset} == {address}" for leaf, offset, address in self.recording.fixed]
        tests += [f"{name}.is_owned" for name in sorted(owned)]
        if self.recording.own:
            tests.append("_queue.lasting")
        return [
            *(f"{name} = {expression}" for name, expression in memories.items()),
            f"if {' and '.join(tests) or True}:",
            *(f"    {line}" for line in passed),
            *(
                f"    _w{i} = _memory(_backend, _alloc({nbytes}, _queue), {nbytes}, _queue)"
                for i, nbytes in enumerate(self.recording.own)
            ),
            *(f"    {line}" for line in self._launches()),
            *self.assigning("    "),
            f"    return {self.expression(self.recording.result)}",
        ]

    def _memory_of(self, place: Any, memories: dict[str, str]) -> str:
        if type(place) is not tuple:
            name = f"_m{id(place.memory)}"
            self.known[f"_of{name}"] = place.memory
            memories[name] = f"_of{name}"
            return name
        if place[0] < 0:
            return f"_w{~place[0]}"
        memories[f"_m{place[0]}"] = f"_a{place[0]}.memory"
        return f"_m{place[0]}"

    def again(self) -> list[str]:
        """Return lines that launch on the example's arrays, whose tests have passed, and return."""
        return [
            *self._launches(example=True),
            *self.assigning(""),
            f"return {self.expression(self.recording.result)}",
        ]

    def _launches(self, example: bool = False) -> list[str]:
        """Write all launches, and what restores arrays if one fails."""
        steps = enumerate(self.recording.steps)
        lines = [line for i, step in steps for line in self._launch(*step, follows=i > 0, example=example)]
        if not self.recording.guards:
            return lines
        restore = f"_restore(({self.leaf_names}), ({self.own_names}), _queue)"
        return ["try:", *(f"    {line}" for line in lines), "except BaseException:", f"    {restore}", "    raise"]

    def _launch(
        self, plan: Plan, places: Sequence[Any], values: tuple, follows: bool, example: bool = False
    ) -> list[str]:
        """Write one launch. Its packets are used by this launch alone and hold the fixed numbers already. follows: as
        of a packet. example: whether the arrays are always the example's, so that the packets hold their addresses,
        too.
        """
        spare: list[Packet] = []
        varying = {
            argument.number: f"_g{i}"
            for i, argument in enumerate(self.recording.arguments)
            if argument.number is not None
        }

        def packet() -> Packet:
            made = plan.backend.packet(plan.entry, plan.grid, plan.block, plan.shared_bytes, plan.template)
            for scalar, value in zip(plan.scalars, values):
                scalar.put(made, value)
            for slot, place in zip(plan.slots, places if example else ()):
                made.words[slot] = self._address_of(place)
            made.follows = follows
            return made

        spare.append(packet())
        take, give, new = self.name(spare.pop), self.name(spare.append), self.name(packet)
        if varying:
            numbers = [f"{self.name(scalar)}.put(_q, {varying[i]})" if i in varying else self.name(value)
                       for i, (scalar, value) in enumerate(zip(plan.scalars, values))]  # fmt: skip
            receipt = "_receipt"
            putting = [f"_receipt = {self.name(plan.receipt)}(({''.join(f'{number}, ' for number in numbers)}))"]
        else:
            receipt, putting = self.name(plan.receipt(values)), []
        return [
            "try:",
            f"    _q = {take}()",
            "except IndexError:",  # no test before the pop: another thread may take the last one in between
            f"    _q = {new}()",
            *([] if example else ["_words = _q.words"]),
            *(f"_words[{slot}] = {self._address(p)}" for slot, p in zip(plan.slots, () if example else places)),
            *putting,
            "if _q.queue is not _queue:",
            "    _q.bind(_queue)",
            "if _q.call()[0]:",
            "    _q.retry()",
            f"{give}(_q)",
            f"_remember({receipt})",
        ]

    def _address_of(self, place: Any) -> int:
        """The address of the example's array."""
        return place.address if type(place) is not tuple else self.recording.leaves[place[0]].address + place[1]

    def _address(self, place: Any) -> str:
        if type(place) is not tuple:
            return str(place.address)
        which, offset = place
        return (f"_a{which}.address" if which >= 0 else f"_w{~which}.address") + (f" + {offset}" if offset else "")

    def assigning(self, indent: str) -> list[str]:
        """Write lines that repeat the function's stores to attributes of its arguments."""
        return [
            f"{indent}{_in_code(f'_g{i}', place)} = {self.expression(tree)}"
            for i, place, tree in self.recording.assigned
        ]

    def expression(self, tree: tuple) -> str:
        """Write the expression of a part of the result."""
        kind = tree[0]
        if kind == "given":
            return f"_g{tree[1]}"
        if kind == "leaf":
            return f"_a{tree[1]}"
        if kind == "view":
            (which, offset), array = tree[1:]
            if which < 0:  # owned memory is aligned
                return f"_of(_w{~which}, _w{~which}.address + {offset}, {self.name(array.signature)})"
            view = (array.shape, array.dtype, array.signature.strides, array.writeable)
            return f"_array(_a{which}.memory, _a{which}.address + {offset}, *{self.name(view)})"
        if kind == "sequence":
            parts = "".join(f"{self.expression(part)}, " for part in tree[2])
            return f"({parts})" if tree[1] is tuple else f"[{parts}]"
        if kind == "dict":
            return "{" + "".join(f"{self.name(key)}: {self.expression(part)}, " for key, part in tree[1].items()) + "}"
        if kind == "made":
            fields = "".join(f"{name!r}: {self.expression(part)}, " for name, part in tree[2].items())
            return f"_made({self.name(tree[1])}, {{{fields}}})"
        return self.name(tree[1])


def _prepared(recording: Recording) -> Callable:
    """Make a function of a recorded call; arguments that are left out are those of the example."""
    arguments, backend, writer = recording.arguments, recording.backend, recording.writer
    labels = [f"_g{i}" for i in range(recording.positional)]
    labels += recording.names
    known = writer.known
    known.update({f"_E{i}": argument.value for i, argument in enumerate(arguments)}, _scope=_scope.get)
    known.update(
        _refuse=partial(_refuse_arguments, recording),
        _own=backend.own_queue,
        _queue_of=backend.queue,
        _careful=_careful(recording),
        _backend=backend,
    )
    known.update(
        {f"_x{leaf}": array for leaf, array in enumerate(recording.leaves)}, _changes=changes, _known=(None, 0)
    )
    defaults = [f"{label}=_E{i}" for i, label in enumerate(labels)]
    positional = "".join(f"{d}, " for d in defaults[: recording.positional]) + ("/, " if recording.positional else "")
    named = defaults[recording.positional :]
    rest, others = ("_" * (1 + max(map(len, ("", *recording.names)))) + name for name in ("rest", "others"))
    passed = "".join(f"{label}, " for label in labels)
    renamed = [f"        _g{i} = {label}" for i, label in enumerate(labels) if label != f"_g{i}"]
    fetch = {
        argument.first + j: _in_code(labels[i], place)
        for i, argument in enumerate(arguments)
        for j, place in enumerate(argument.places)
    }
    fixed = [f"{labels[i]} is _E{i}" for i, argument in enumerate(arguments) if argument.places != (None,)]
    fixed += [f"{writer.name(x.is_like)}({labels[i]})" for i, x in enumerate(arguments) if x.may_change]
    alike = [f"_a{leaf}.signature is {writer.name(array.signature)}" for leaf, array in enumerate(recording.leaves)]
    example = " and ".join(f"_a{leaf} is _x{leaf}" for leaf in range(len(recording.leaves)))
    # A call on the example's arrays that passes all tests notes its queue and the count of changes. The next one need
    # not repeat the tests of the memory while both are the same: arrays are fixed, and so is what memory they share.
    lines = [
        f"def prepared({positional}*{rest}, {''.join(f'{d}, ' for d in named)}stream=None, **{others}):",
        "    global _known",
        f"    if {rest} or {others}:",
        f"        _refuse({rest}, {others})",
        "    try:",
        *(f"        _a{leaf} = {source}" for leaf, source in fetch.items()),
        f"        _alike = {' and '.join(['not _observers', *fixed])}",
        f"        _same = {example}",
        "        if not _same and _alike:",
        f"            _alike = {' and '.join(alike)}",
        "    except (AttributeError, LookupError, TypeError, ValueError):",
        "        _alike = False",
        "    if _alike:",
        *renamed,
        "        _here = _scope()",
        "        _queue = _here.queue if stream is None else _queue_of(stream)",
        "        if _queue is None or _queue.backend is not _backend:",
        "            _queue = _own",
        "        if _here.recorder is None:",
        "            _now = _queue, _changes.count",
        "            if _same and _known == _now:",
        *(f"                {line}" for line in writer.again()),
        *(f"            {line}" for line in writer.lines(["if _same:", "    _known = _now"])),
        f"    return _careful(({passed}), stream)",
    ]
    exec("\n".join(lines), known)
    function = known["prepared"]
    function.__name__ = function.__qualname__ = f"prepared_{recording.name}"
    function.__doc__ = (
        f"{recording.name}, prepared on {backend.describe()}: {len(recording.steps)} launches; see ptxrt.prepare."
    )
    function.__module__ = __name__
    function.launches = tuple(plan.receipt(values) for plan, _, values in recording.steps)
    return function


def _refuse_arguments(recording: Recording, rest: Sequence[Any], others: Collection[str]) -> NoReturn:
    """Raise ArgumentError for arguments that the example does not have."""
    count = recording.positional
    found = f"the argument{'s' * (len(others) > 1)} {', '.join(others)}" if others else f"{count + len(rest)} arguments"
    names = "".join(f", {name}" for name in recording.names)
    raise ArgumentError(
        f"prepared: {found} came; {recording.name} was prepared with {count} by position{names}. Prepare another call."
    )


def _careful(recording: Recording) -> Callable:
    """Make a prepared call that compares every argument with the example and reports what differs."""

    def call(arguments: Sequence[Any], stream=None):
        leaves = recording.leaves.copy()
        for argument, value in zip(recording.arguments, arguments):
            if argument.number is None and (value is not argument.value or argument.places or argument.may_change):
                argument.put(value, leaves)
        if unlike := recording.unlike(leaves):
            raise ArgumentError(_in_words(recording, unlike))
        return recording.run(arguments, leaves, recording.backend.queue(stream), _scope.get().recorder)

    return call


def _in_words(recording: Recording, unlike: _Unlike) -> str:
    """Return the message for arrays that lie to each other otherwise than those of the example."""
    labels = [_in_code(argument.label, place) for argument in recording.arguments for place in argument.places]
    for (one, other), before, now in zip(recording.pairs, recording.relation, unlike.relation):
        if before != now:
            words = f"{labels[one]} and {labels[other]} "
            if before is None:
                words += "overlap in memory, those of the example do not"
            elif now is None:
                words += "share no memory, those of the example do"
            else:
                words += f"begin {now} bytes apart in memory, those of the example {before}"
            return f"prepared: {words}. Prepare another call for them."
    names = ", ".join(labels[leaf] for leaf, _, _ in recording.fixed)
    return f"prepared: {names} must lie where the function has it already. Prepare another call for it."


def remembered(function: Callable[P, R], numbers: Collection[str] = ()) -> Callable[P, R]:
    """Mark a function whose launches depend only on the shapes, dtypes and plain values of its arguments.

    The launches of a call on device arrays are recorded at its second occurrence. Later calls that are alike only
    repeat them, on their own arrays and on new memory for what the function allocates. numbers: names of arguments
    whose values may differ between calls that are alike.
    """

    @wraps(function)
    def call(*arguments, **named):
        leaves: list[DeviceArray] = []
        held: list[Any] = []
        key = _key(function, arguments, named, numbers, leaves, held)
        if key is None:
            return function(*arguments, **named)
        backend = leaves[0].backend
        # Key -> (_FIRST after one call, then a Recording or None; the objects that the key holds by identity).
        calls = backend.remembered.calls
        here = _scope.get()
        while True:
            found = calls.get(key)
            if found is None:
                result = function(*arguments, **named)
                Remembered.add(calls, key, (_FIRST, held))
                return result
            recording = found[0]
            if recording is _FIRST and here.recorder is None:
                recording = _recorded(function, arguments, named)
                calls[key] = recording, found[1]
            if type(recording) is not Recording:
                return function(*arguments, **named)
            if here.backend is not backend and here.backend is not None:
                launch.check_machine(recording.name, "its array", backend, here.backend)
            queue = backend.queue(named.get("stream"))
            given = named if "stream" not in named else {n: v for n, v in named.items() if n != "stream"}
            result = recording.replay((*arguments, *given.values()), leaves, queue, here.recorder)
            if type(result) is not _Unlike:
                return result
            key = key, result.relation  # calls whose arrays lie so have a record of their own

    return call


_FIRST = object()


def _recorded(function: Callable, arguments: tuple, named: dict[str, Any]) -> Recording | None:
    """Return the recording of a call; None if each call must run the function."""
    try:
        recording = Recording(function, arguments, named, keep=False)
    except PtxError:  # it waits, copies or is refused: the function itself raises the clearer error
        return None
    return recording if recording.is_new else None


def _key(
    function: Callable, arguments: tuple, named: dict[str, Any], numbers: Collection[str], leaves: list, held: list
) -> tuple | None:
    """Return a key of all that the launches of a call depend on; None if that cannot be known.

    Device arrays are appended to `leaves`, immutable objects that the key holds by identity to `held`.
    """
    key: list[Any] = [function, len(arguments)]
    add = key.append
    for value in arguments:
        if type(value) is DeviceArray:
            add(value.signature)
            leaves.append(value)
        elif not _add(value, add, leaves, held):
            return None
    for label, value in named.items():
        if label != "stream":
            add(label)
            if type(value) is DeviceArray:
                add(value.signature)
                leaves.append(value)
            elif label not in numbers and not _add(value, add, leaves, held):
                return None
    return tuple(key) if leaves else None


def _add(value: Any, add: Callable, leaves: list, held: list) -> bool:
    """Add an argument that is no array to a key; return False if its launches may depend on more than the key can
    hold.
    """
    kind = type(value)
    if kind in _EXACT or isinstance(value, np.dtype):
        add(kind)
        add(value)
    elif kind is float:
        add(repr(value))  # 0.0 and -0.0 are equal
    elif kind is type and issubclass(value, np.generic):
        add(value)
    elif kind is tuple and all(type(item) in _EXACT for item in value):
        add(value)
        add(tuple(map(type, value)))
    elif kind in _HOLDERS or _holds_arrays(kind, value):
        add(kind)
        add(tuple(value.__dict__))
        for item in value.__dict__.values():
            inner = type(item)
            if inner is DeviceArray:
                add(item.signature)
                leaves.append(item)
            elif inner in _EXACT:
                add(inner)
                add(item)
            elif _is_frozen(inner):
                add(id(item))
                held.append(item)
            else:
                return False
    else:
        return False
    return True


_EXACT = frozenset((bool, int, str, type(None), *(type(np.dtype(name)) for name in ("f2", "f4", bf16.dtype))))
# Classes of which an object with device arrays was found.
_HOLDERS: set[type] = set()


@cache
def _is_frozen(kind: type) -> bool:
    """Return whether objects of a class never change, which frozen dataclasses promise."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _holds_arrays(kind: type, value: Any) -> bool:
    if any(type(item) is DeviceArray for item in getattr(value, "__dict__", {}).values()):
        _HOLDERS.add(kind)
        return True
    return False
