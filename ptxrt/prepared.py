"""Prepared calls: what a call of any function here launches, with everything but its addresses and numbers done once.

The same for calls that nobody prepared: functions marked `@remembered` launch at once what a call just like it launched before.
"""

from __future__ import annotations

import copy
from functools import lru_cache, wraps
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, Callable, Protocol, Sequence, TypeVar

import numpy as np

from . import launch
from .array import Borrowed, DeviceArray, _as_array, is_foreign
from .backend import Packet, Queue, Remembered, _scope, enter, leave
from .errors import ArgumentError
from .formats import bf16
from .kernel import Kernel
from .launch import Launch, Plan

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Prepared(Protocol[R]):
    """What `prepare` gives: a function whose arguments are those of the example, where they are left out. launches: the receipts."""

    launches: tuple[Launch, ...]

    def __call__(self, *arguments: Any, stream: Any = ..., **named: Any) -> R: ...


def prepare(op: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> Prepared[R]:
    """Prepare `op(*arguments, **named)`: any kernel, function of this package, or function made of them.

        prepared = ptxrt.prepare(ptxrt.quantize, x, "mxfp4", out=q)
        prepared(x, "mxfp4", out=q)                # or another x and q of the same shapes and dtypes
        prepared(x)                                # arguments that are left out are those of the example

    The example's arrays are device arrays (or another library's); nothing is launched here. A prepared call does nothing
    but its launches: memory that the call works in, and results that it was not given an `out` for, are allocated here and
    used by every call; such results are overwritten by the next. It gives what `op` gives, and takes `stream=` besides.
    Numbers of a kernel may differ from call to call; all else must be like the example. `prepared.launches` are the receipts.
    ArgumentError where `op` waits for the device or copies, which cannot be prepared, and for calls unlike the example.
    """
    return _Prepared(op, arguments, named).function()


class _Stand(Borrowed):
    """Stands for an example's memory while launches are recorded, so that each array is known by its argument."""

    __slots__ = ("leaf",)

    def __init__(self, array: DeviceArray, leaf: int):
        super().__init__(array.backend, array.address, array.memory.nbytes, array, None)
        self.leaf = leaf


class _At:
    """Memory some bytes into an array: what a launch needs of one."""

    __slots__ = ("address", "memory")

    def __init__(self, array: DeviceArray, offset: int):
        self.address, self.memory = array.address + offset, array.memory


class _Recorder:
    """Takes the launches of one call instead of the machine."""

    name = "ptxrt.prepare"

    def __init__(self):
        self.steps: list[tuple[Plan, tuple, tuple]] = []

    def add(self, plan: Plan, packet: Packet, arrays: Sequence[DeviceArray], values: tuple, queue: Queue) -> None:
        plan.keep(packet)
        self.steps.append((plan, tuple(arrays), values))


class _Step:
    """One launch: its plan, and by array the argument and the offset in it, or an array of its own."""

    __slots__ = ("plan", "sources", "values", "own")

    def __init__(self, plan: Plan, arrays: Sequence[DeviceArray], values: tuple):
        self.plan, self.values = plan, values
        self.sources: list[tuple[int, int]] = []
        self.own: list[DeviceArray | None] = []
        for array in arrays:
            memory = array.memory
            if isinstance(memory, _Stand):
                self.sources.append((memory.leaf, array.address - memory.owner.address))
                self.own.append(None)
            else:
                self.sources.append((-1, 0))
                self.own.append(array)

    def arrays(self, leaves: Sequence[DeviceArray]) -> list:
        """What to launch on."""
        return [
            own if own is not None else _At(leaves[leaf], offset) if offset else leaves[leaf]
            for (leaf, offset), own in zip(self.sources, self.own)
        ]


class _Slot:
    """One argument: what it was called, the arrays in it, and their signatures.

    attributes: names of the arrays in an object, (None,) for an array itself, empty for what is fixed.
    """

    __slots__ = ("label", "value", "attributes", "first", "signatures", "scalar")

    def __init__(self, label: str, value: Any, leaves: list[DeviceArray]):
        self.label, self.value, self.first, self.scalar = label, value, len(leaves), None
        if is_array(value):
            self.value = value = _as_array("prepare", label, value)
            if not isinstance(value, DeviceArray):
                raise ArgumentError(f"prepare: {label} is a NumPy array; prepared calls take device arrays, see ptxrt.to_device")
            self.attributes: tuple = (None,)
            leaves.append(value)
        else:
            self.attributes = tuple(name for name, item in getattr(value, "__dict__", {}).items() if isinstance(item, DeviceArray))
            leaves += [getattr(value, name) for name in self.attributes]
        self.signatures = tuple(leaf.signature for leaf in leaves[self.first :])

    def stand(self, leaves: Sequence[DeviceArray]) -> Any:
        """The argument over memory that stands for its own."""
        arrays = [
            DeviceArray(_Stand(leaf, self.first + i), leaf.address, leaf.shape, leaf.dtype, leaf.strides, leaf.writeable)
            for i, leaf in enumerate(leaves[self.first : self.first + len(self.attributes)])
        ]
        if self.attributes == (None,):
            return arrays[0]
        if not self.attributes:
            return self.value
        stands = copy.copy(self.value)
        for name, array in zip(self.attributes, arrays):
            setattr(stands, name, array)
        return stands

    def put(self, value: Any, leaves: list) -> None:
        """Place an argument of a call; ArgumentError unless it is like the example."""
        if not self.attributes:
            same = value is self.value or (type(value) is type(self.value) and _equal(value, self.value))
            if not same:
                raise ArgumentError(f"prepared: {self.label} is {value!r}; it was prepared with {self.value!r}. Prepare another call for it.")
            return
        if self.attributes == (None,):
            arrays = [_as_array("prepared", self.label, value)] if is_array(value) else [value]
        else:
            if type(value) is not type(self.value):
                raise ArgumentError(f"prepared: {self.label} is a {type(value).__name__}; pass a {type(self.value).__name__} as in the example")
            arrays = [getattr(value, name) for name in self.attributes]
            mine = {n: v for n, v in vars(self.value).items() if n not in self.attributes}
            theirs = {n: v for n, v in vars(value).items() if n not in self.attributes}
            if mine.keys() != theirs.keys() or not all(_equal(mine[n], theirs[n]) for n in mine):
                raise ArgumentError(f"prepared: {self.label} is {value!r}; it was prepared with {self.value!r}. Prepare another call for it.")
        for i, (array, wanted) in enumerate(zip(arrays, self.signatures)):
            if not isinstance(array, DeviceArray):
                raise ArgumentError(f"prepared: {self.label} is a {type(array).__name__}; pass a device array")
            if array.signature is not wanted and str(array.signature) != str(wanted):
                raise ArgumentError(f"prepared: {self.label} is {array.signature}; it was prepared with {wanted}. Prepare another call for it.")
            leaves[self.first + i] = array


def is_array(value: Any) -> bool:
    """Whether a value is one array, of anyone's."""
    return isinstance(value, (DeviceArray, np.ndarray)) or (is_foreign(value) and not isinstance(value, np.generic))


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (TypeError, ValueError):
        return False


class _Prepared:
    """What a prepared call knows: its arguments, its launches, and what it gives."""

    def __init__(self, op: Callable, arguments: tuple, named: dict[str, Any]):
        self.name = getattr(op, "name", None) or getattr(op, "__name__", repr(op))
        stream = named.pop("stream", None)
        self.positional, self.names = len(arguments), tuple(named)
        if not all(name.isidentifier() and not iskeyword(name) for name in named):
            raise ArgumentError(f"prepare: {self.name} was given {sorted(named)}, of which not all are names of arguments")
        self.leaves: list[DeviceArray] = []
        self.slots = [_Slot(f"argument {i}", value, self.leaves) for i, value in enumerate(arguments)]
        self.slots += [_Slot(name, value, self.leaves) for name, value in named.items()]
        if not self.leaves:
            raise ArgumentError(f"prepare: {self.name} was given no device array; see ptxrt.to_device")
        stands = [slot.stand(self.leaves) for slot in self.slots]
        recorder = _Recorder()
        before = enter(recorder=recorder)
        try:
            result = op(*stands[: len(arguments)], **dict(zip(named, stands[len(arguments) :])), **({} if stream is None else {"stream": stream}))
        finally:
            leave(before, "recorder")
        self.steps = [_Step(*step) for step in recorder.steps]
        backends = {step.plan.backend for step in self.steps} or {self.leaves[0].backend}
        if len(backends) > 1:
            raise ArgumentError(f"prepare: {self.name} runs on several devices: {', '.join(b.describe() for b in backends)}; prepare a call for each")
        (self.backend,) = backends
        if isinstance(op, Kernel):
            self._find_scalars()
        self.assigned = self._assignments(stands)
        self.result = self._template(result, stands)
        self.simple = self._simple(result, stands)

    def _find_scalars(self) -> None:
        """Let the numbers of a single launch be given anew."""
        for slot in self.slots:
            for step in self.steps:
                for i, scalar in enumerate(step.plan.scalars):
                    if slot.label == scalar.name:
                        slot.scalar = i

    def _assignments(self, stands: list) -> list[tuple[int, str, Callable]]:
        """What the op put into its arguments (a QuantizedArray's global scale, say), to be done at every call as well."""
        changed = []
        for i, (slot, stand) in enumerate(zip(self.slots, stands)):
            for j, name in enumerate(slot.attributes):
                item, leaf = (None, None) if name is None else (getattr(stand, name), self.leaves[slot.first + j])
                memory = getattr(item, "memory", None)
                same = isinstance(memory, _Stand) and memory.leaf == slot.first + j and item.signature is leaf.signature
                if name is not None and not same:
                    changed.append((i, name, self._template(item, stands)))
        return changed

    def _simple(self, result: Any, stands: list):
        """(None, [part]) or (tuple, parts) where every part is ("given", argument) or ("leaf", array); else None."""
        parts = []
        for item in result if type(result) is tuple else (result,):
            given = next((i for i, stand in enumerate(stands) if item is stand), None)
            if given is not None:
                parts.append(("given", given))
            elif isinstance(item, DeviceArray) and isinstance(item.memory, _Stand) and self._is_leaf(item):
                parts.append(("leaf", item.memory.leaf))
            else:
                return None
        return (tuple if type(result) is tuple else None), parts

    def _is_leaf(self, array: DeviceArray) -> bool:
        """Whether an array over an argument's memory is that argument, and no view of it."""
        leaf = self.leaves[array.memory.leaf]
        return array.signature is leaf.signature and array.address == leaf.address

    def _template(self, result: Any, stands: list) -> Callable[[Sequence, list], Any]:
        """How a call's result comes from its arguments and leaves."""
        for i, stand in enumerate(stands):
            if result is stand:
                return lambda given, leaves: given[i]
        if isinstance(result, DeviceArray) and isinstance(result.memory, _Stand):
            leaf, view = result.memory.leaf, (result.shape, result.dtype, result.signature.strides, result.writeable)
            if self._is_leaf(result):
                return lambda given, leaves: leaves[leaf]
            offset = result.address - result.memory.address
            return lambda given, leaves: DeviceArray(leaves[leaf].memory, leaves[leaf].address + offset, *view)
        if type(result) in (tuple, list):
            parts = [self._template(item, stands) for item in result]
            return lambda given, leaves: type(result)([part(given, leaves) for part in parts])
        if isinstance(result, dict):
            table = {name: self._template(item, stands) for name, item in result.items()}
            return lambda given, leaves: {name: part(given, leaves) for name, part in table.items()}
        held = [n for n, item in getattr(result, "__dict__", {}).items() if isinstance(item, DeviceArray) and isinstance(item.memory, _Stand)]
        if held:
            inner = {name: self._template(getattr(result, name), stands) for name in held}

            def rebuild(given, leaves):
                made = copy.copy(result)
                for name, part in inner.items():
                    setattr(made, name, part(given, leaves))
                return made

            return rebuild
        return lambda given, leaves: result

    def call(self, given: Sequence[Any], stream=None):
        """Launch on one value for each argument."""
        leaves = self.leaves.copy()
        values = None
        for slot, value in zip(self.slots, given):
            if value is slot.value and not slot.attributes:
                continue
            if slot.scalar is None:
                slot.put(value, leaves)
            else:
                values = values or list(self.steps[0].values)
                values[slot.scalar] = value
        queue = self.backend.queue(stream)
        recorder = _scope.get().recorder
        for step in self.steps:
            arrays = step.arrays(leaves)
            step.plan.do(arrays, step.values if values is None else tuple(values), queue, recorder)
        for i, name, part in self.assigned:
            setattr(given[i], name, part(given, leaves))
        return self.result(given, leaves)

    def function(self) -> Callable:
        """The call as a function. The usual call, one launch in one stream on arrays just like the example's, is written out
        for its arguments, since each step of a loop over them would cost several percent of a launch; all else is `call`.
        """
        labels = [*(f"_{i}" for i in range(self.positional)), *self.names]
        known: dict[str, Any] = {f"E{i}": slot.value for i, slot in enumerate(self.slots)}
        known.update(call_with=self.call)
        defaults = [f"{label}=E{i}" for i, label in enumerate(labels)]
        positional = "".join(f"{d}, " for d in defaults[: self.positional]) + ("/, " if self.positional else "")
        given = "".join(f"{label}, " for label in labels)
        lines = [
            f"def prepared({positional}*, {''.join(f'{d}, ' for d in defaults[self.positional :])}stream=None):",
            *(self._fast_lines(labels, known) if len(self.steps) == 1 and not self.assigned else []),
            f"    return call_with(({given}), stream)",
        ]
        exec("\n".join(lines), known)
        function = known["prepared"]
        function.__name__ = function.__qualname__ = f"prepared_{self.name}"
        function.__doc__ = f"{self.name}, prepared on {self.backend.describe()}: {len(self.steps)} launches; see ptxrt.prepare."
        function.__module__ = __name__
        function.launches = tuple(step.plan.receipt(step.values) for step in self.steps)
        return function

    def _fast_lines(self, labels: list[str], known: dict[str, Any]) -> list[str]:
        """The lines that launch, if nothing out of the ordinary came; what they name goes into `known`."""
        (step,) = self.steps
        if any(offset for _, offset in step.sources):
            return []
        plan, lines = step.plan, []
        fetch = {}  # leaf -> the expression that gives it
        tests = ["not observers"]
        for i, slot in enumerate(self.slots):
            if slot.attributes != (None,):
                tests.append(f"{labels[i]} is E{i}")
            for j, attribute in enumerate(slot.attributes):
                fetch[slot.first + j] = labels[i] if attribute is None else f"{labels[i]}.{attribute}"
        lines += [f"        a{leaf} = {source}" for leaf, source in fetch.items()]
        for leaf, array in enumerate(self.leaves):
            known[f"S{leaf}"] = array.signature
            tests.append(f"a{leaf}.signature is S{leaf}")
        names = []
        for k, ((leaf, _), own) in enumerate(zip(step.sources, step.own)):
            names.append(f"a{leaf}" if own is None else f"W{k}")
            known[f"W{k}"] = own
        launching = plan.launch_lines(names, step.values, known)
        known.update(scope=_scope.get, own=self.backend.own_queue)
        known.update(result=self.result, backend=self.backend, queue_of=self.backend.queue)
        given = "".join(f"{label}, " for label in labels)
        leaves = "".join(f"a{leaf}, " for leaf in fetch)
        return [
            "    try:",
            *lines,
            f"        alike = {' and '.join(tests)}",
            "    except AttributeError:",
            "        alike = False",
            "    if alike:",
            "        here = scope()",
            "        queue = here.queue if stream is None else queue_of(stream)",
            "        if queue is None or queue.backend is not backend:",
            "            queue = own",
            "        if here.recorder is None:",
            *(f"            {line}" for line in launching),
            f"                return {self._result_source(labels, known) or f'result(({given}), ({leaves}))'}",
        ]

    def _result_source(self, labels: list[str], known: dict[str, Any]) -> str | None:
        """The result as an expression, where it is an argument, or arrays that are arguments."""
        if self.simple is None:
            return None
        parts = [labels[i] if kind == "given" else f"a{i}" for kind, i in self.simple[1]]
        return parts[0] if self.simple[0] is None else f"({', '.join(parts)},)"


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function whose launches depend on nothing but the shapes, dtypes and plain values of its arguments.

    Of a call with `out=` on device arrays, which launches without memory of its own, is kept what it launches; a call
    that is alike then does that alone.
    """
    @wraps(function)
    def call(*arguments, **named):
        if named.get("out") is None:
            return function(*arguments, **named)
        leaves: list[DeviceArray] = []
        held: list[Any] = []
        key = _key(function, arguments, named, leaves, held)
        if key is None:
            return function(*arguments, **named)
        calls = leaves[0].backend.remembered.calls  # by key the launches, or None, and the objects that the key knows by identity
        replay, _ = calls.get(key, (None, None))
        if replay is not None:
            return replay.run(arguments, named, leaves)
        result = function(*arguments, **named)
        if key not in calls and _scope.get().recorder is None:
            Remembered.add(calls, key, (_Replay.of(function, arguments, named), held))
        return result

    return call


def _key(function: Callable, arguments: tuple, named: dict[str, Any], leaves: list, held: list) -> tuple | None:
    """What the launches of a call depend on; None where that is not known.

    Its device arrays go into `leaves`; into `held` go immutable objects that it knows by identity.
    """
    key: list[Any] = [function, len(arguments)]
    add = key.append
    for value in arguments:
        if not _add(value, add, leaves, held):
            return None
    for label, value in named.items():
        if label != "stream":
            add(label)
            if not _add(value, add, leaves, held):
                return None
    return tuple(key) if leaves else None


def _add(value: Any, add: Callable, leaves: list, held: list) -> bool:
    """Add one argument to a key; False where its launches may depend on more than can be told."""
    kind = type(value)
    if kind is DeviceArray:
        add(value.signature)
        leaves.append(value)
    elif kind in _EXACT:
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
# Classes of which one object held device arrays.
_HOLDERS: set[type] = set()


@lru_cache(maxsize=None)
def _is_frozen(kind: type) -> bool:
    """Whether objects of a class never change: frozen dataclasses."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _holds_arrays(kind: type, value: Any) -> bool:
    if any(type(item) is DeviceArray for item in getattr(value, "__dict__", {}).values()):
        _HOLDERS.add(kind)
        return True
    return False


class _Replay:
    """The launches of a call, and which argument it gives back; it keeps nothing of the call that it was made from."""

    __slots__ = ("backend", "steps", "result")

    def __init__(self, backend, steps: list, result: Any):
        self.backend, self.steps, self.result = backend, steps, result

    @classmethod
    def of(cls, function: Callable, arguments: tuple, named: dict[str, Any]) -> "_Replay | None":
        """None for a call that has memory of its own, or gives anything but an argument."""
        try:
            prepared = _Prepared(function, arguments, {name: value for name, value in named.items() if name != "stream"})
        except ArgumentError:
            return None
        if prepared.assigned or any(own is not None for step in prepared.steps for own in step.own):
            return None
        if prepared.simple is None or prepared.simple[0] is not None or prepared.simple[1][0][0] != "given":
            return None
        i = prepared.simple[1][0][1]
        names = [name for name in named if name != "stream"]
        result = i if i < len(arguments) else names[i - len(arguments)]
        return cls(prepared.backend, [(step.plan, tuple(step.sources), step.values) for step in prepared.steps], result)

    def run(self, arguments: tuple, named: dict[str, Any], leaves: list) -> Any:
        """Launch on the arrays of this call."""
        here = _scope.get()
        if here.backend is not self.backend and here.backend is not None:
            launch.check_machine("the call", "its array", self.backend, here.backend)
        queue = self.backend.queue(named.get("stream"))
        for plan, sources, values in self.steps:
            arrays = [_At(leaves[leaf], offset) if offset else leaves[leaf] for leaf, offset in sources]
            plan.do(arrays, values, queue, here.recorder)
        return arguments[self.result] if type(self.result) is int else named[self.result]
