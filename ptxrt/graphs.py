"""Graphs: launches that are gathered once and launched again as one; on a GPU by stream capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .array import DeviceArray, Memory, changes, new_memory
from .backend import Packet, Queue, enter, leave, recorded_use, scope
from .errors import ArgumentError
from .launch import Launch, Plan, announce
from .selection import current
from .turns import Turn

if TYPE_CHECKING:
    from .typing import StreamLike


class graph:
    """Gather the calls of a block and run them again with one launch.

        with ptxrt.graph() as g:
            ptxrt.quantize(x, "mxfp4", out=q)
            ptxrt.dequantize(q, out=y)
        g.launch()

    Calls in the block run nothing: they become part of the graph, on the same arrays each time. The graph keeps the
    memory of these arrays, also of results that the block allocates. Calls take device arrays and the graph's own
    stream (`stream=None`). A call that would wait or copy raises ArgumentError, but for copies of `PageLocked` arrays.
    On the emulator the calls are recorded and run again one by one.
    """

    name = "ptxrt.graph"

    def __init__(self) -> None:
        self.backend: Any = None
        self.queue: Queue | None = None
        self._captured: Any = None
        self._calls: list[tuple[Callable[[Queue], None], Any]] = []  # on the emulator, with what they need
        self._copies: list[Callable[[Queue], None]] = []  # they hold memory of the host
        self._modules: set[Any] = set()  # that must stay loaded
        self._turn = Turn(lambda _: None, survives_fork=True)
        self._uses: dict[Memory, bool] = {}
        # The queue of a launch that waited for nothing and changed no use, and the count of changes then. Launches in
        # this queue do not look at the memory while that count stands.
        self._settled: tuple[Queue, int] | None = None
        self._receipts: list[Launch] = []
        self._receipt: Launch | None = None  # of the whole graph, once its block has ended
        self._state = "new"

    def __enter__(self) -> "graph":
        if self._state != "new" or scope().recorder is not None:
            raise ArgumentError(
                "ptxrt.graph: a graph is gathered once, and not within another or within ptxrt.prepare; make a new one"
            )
        self.backend = current()
        self.queue = self.backend.new_queue()
        self._capture = self.backend.capture(self.queue)
        self._state = "gathering"
        self._before = enter(backend=self.backend, queue=self.queue, recorder=self)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        leave(self._before, "backend", "queue", "recorder")
        self._state = "ready" if kind is None else "failed"
        try:
            self._captured = self._capture.end(kind is None)
        except Exception:
            self._state = "failed"
            raise

    def add(self, plan: Plan, packet: Packet, arrays: Sequence[DeviceArray], values: tuple, queue: Queue) -> None:
        """Add one launch, whose parameters are in `packet`."""
        self._check_place(plan.backend, queue)
        if self.backend.is_cuda:
            packet.record(queue)
            plan.keep(packet)
            self._modules.add(plan.entry.owner)
        else:
            self._calls.append((packet.launch, (plan, arrays)))
        for array, write in zip(arrays, plan.writes):
            self._uses[array.memory] = self._uses.get(array.memory, False) or write
        self._receipts.append(plan.receipt(values))

    def add_copy(self, array: DeviceArray, write: bool, start: Callable[[Queue], None], queue: Queue) -> None:
        """Add a copy between page-locked memory and an array, which it writes or reads."""
        self._check_place(array.backend, queue)
        if self.backend.is_cuda:
            start(queue)
        else:
            self._calls.append((start, array))
        self._copies.append(start)
        self._uses[array.memory] = self._uses.get(array.memory, False) or write

    def _check_place(self, backend: Any, queue: Queue) -> None:
        """Raise ArgumentError for a call on another machine or stream."""
        if backend is not self.backend:
            raise ArgumentError(
                f"ptxrt.graph: the graph is for {self.backend.describe()}, the call for {backend.describe()}"
            )
        if queue is not self.queue:
            raise ArgumentError("ptxrt.graph: a call in the block names another stream; leave out stream=")

    def new_memory(self, backend: Any, nbytes: int, queue: Queue) -> Memory:
        """Allocate memory for a call in the block."""
        return new_memory(backend, nbytes, queue)

    def launch(self, stream: StreamLike = None) -> None:
        """Run the launches of the graph, in order, in a stream. The call does not wait.

        Threads that launch one graph take turns, so that its launches do not interleave.
        """
        if self._state != "ready":
            raise ArgumentError(f"ptxrt.graph: the graph is {self._state}; launch it after its block has ended well")
        if scope().recorder is not None:
            raise ArgumentError(
                f"{scope().recorder.name}: a graph cannot be part of another recording; launch it afterwards"
            )
        if not self._receipts and not self._copies:
            return
        queue = self.backend.queue(stream)
        with self._turn:
            now = queue, changes.count
            if self._settled == now:
                announce(self.receipt, self.backend, queue, self._run, queue)
                return
            for memory, write in self._uses.items():
                memory.acquire(queue, write)
            with recorded_use(self.backend, queue):
                announce(self.receipt, self.backend, queue, self._run, queue)
                mark = self.backend.mark(queue)
                for memory, write in self._uses.items():
                    memory.release(queue, mark, write)
            if queue.lasting and changes.count == now[1] and not any(map(self._waits_each_time, self._uses)):
                self._settled = now

    def _waits_each_time(self, memory: Memory) -> bool:
        """Return whether a lender of memory and each launch wait for each other."""
        return not memory.is_owned and getattr(memory, "lender", None) is not None

    def _run(self, queue: Queue) -> None:
        if self._captured is not None:
            self._captured.launch(queue)
        for call, _ in self._calls:
            call(queue)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Return the receipts of the gathered launches."""
        return tuple(self._receipts)

    @property
    def receipt(self) -> Launch:
        """Return the receipt of one launch of the whole graph, with the sums of its launches' bytes and flops."""
        if self._receipt is not None:
            return self._receipt
        parts = self._receipts
        sums = [
            None if None in column else sum(column)
            for column in ([p.bytes_moved for p in parts], [p.flops for p in parts])
        ]
        names = ", ".join(dict.fromkeys(p.entry for p in parts))
        first = parts[0] if parts else None
        whole = Launch(
            *(f"graph of {len(parts)}", self.backend.name, self.backend.describe(), names),
            *((first.grid, first.block) if first else ((1, 1, 1), (1, 1, 1))),
            *(max((p.shared_bytes for p in parts), default=0), *sums, ",".join(dict.fromkeys(p.module for p in parts))),
        )
        if self._state == "ready":
            self._receipt = whole
        return whole

    def __repr__(self) -> str:
        where = f" on {self.backend.describe()}" if self.backend else ""
        return f"<graph of {len(self._receipts)} launches{where}, {self._state}>"
