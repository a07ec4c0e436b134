"""Streams, events, and figures of memory."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from .backend import MemoryInfo, enter, enter_block, leave_block, refuse_pickle, refuse_recording
from .errors import ArgumentError
from .selection import current, place

if TYPE_CHECKING:
    from .typing import StreamLike


class Stream:
    """A stream of the current machine. Work of different streams is not ordered, unless it shares arrays.

        with ptxrt.Stream() as stream:      # calls in the block that name no stream use this one
            y = ptxrt.quantize(x, "mxfp4")
        stream.synchronize()

    Arrays may be used in several streams: a launch of this library waits for the launches that it depends on.
    Other libraries take the stream by `__cuda_stream__`.

    Args:
        device: The CUDA number of a device; None is the current device.
        priority: Lower numbers have higher priority, as in CUDA.

    Raises:
        ArgumentError: The priority is no whole number, or there is no such device.
    """

    def __init__(self, *, device: int | None = None, priority: int = 0):
        try:
            number = 2**31 if isinstance(priority, bool) else index(priority)
        except TypeError:
            number = 2**31
        if not -(2**31) <= number < 2**31:
            raise ArgumentError(f"Stream: priority is {priority!r}; pass a whole number, such as -1")
        self.backend = place(device)
        self.queue = self.backend.new_queue(number)

    @property
    def handle(self) -> int:
        """The integer handle; 0 on the emulator."""
        return self.queue.handle

    @property
    def done(self) -> bool:
        """Whether everything in the stream is done; never waits."""
        return self.backend.reached(self.queue)

    def synchronize(self) -> None:
        """Wait until everything in the stream is done. ArgumentError while `graph` or `prepare` records."""
        refuse_recording("synchronize waits for the device")
        self.backend.synchronize(self.queue)

    def record(self) -> "Event":
        """Record a new event at the present end of the stream. ArgumentError while `graph` or `prepare` records."""
        event = Event(device=self.backend.ordinal)
        event.record(self)
        return event

    def wait(self, other: Event | StreamLike) -> None:
        """Make later work in this stream wait, on the device, for an Event or for the present end of another stream.

        ArgumentError while `graph` or `prepare` records: a graph orders its launches by the arrays that they share.
        """
        refuse_recording("a stream would wait, which is no launch")
        if isinstance(other, Event):
            self.backend.wait(self.queue, other._point("wait"))
        else:
            source = other.backend if isinstance(other, Stream) else self.backend
            self.backend.wait(self.queue, source.mark(getattr(other, "queue", other)))

    def __enter__(self) -> "Stream":
        enter_block(self, enter(queue=self.queue))
        return self

    def __exit__(self, *exception: object) -> None:
        leave_block(self, "queue")

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version 0 of the protocol, and the handle."""
        return 0, self.queue.handle

    def __repr__(self) -> str:
        return f"<{self.queue!r}>"

    def __reduce__(self) -> Any:
        refuse_pickle(self, "make another Stream")


class Event:
    """A point in a stream, with its time.

        start, stop = ptxrt.Event(), ptxrt.Event()
        start.record(); ...; stop.record()
        start.elapsed_time(stop)            # milliseconds; waits for both

    Args:
        device: The CUDA number of a device; None is the current device.
    """

    def __init__(self, *, device: int | None = None):
        self.backend = place(device)
        self._event: Any = None

    def record(self, stream: StreamLike = None) -> "Event":
        """Record the event at the present end of a stream; None is that of `with stream:`, else the library's own.

        ArgumentError while `graph` or `prepare` records. To time a graph, record events around its launch.
        """
        refuse_recording("an event would be recorded, which is no launch")
        self._event = self.backend.timed_event(self.backend.queue(stream))
        return self

    def _point(self, what: str):
        if self._event is None:
            raise ArgumentError(f"Event.{what}: the event was never recorded; call record() first")
        return self._event

    @property
    def done(self) -> bool:
        """Whether the event is reached; never waits."""
        return self.backend.reached(self._point("done"))

    def synchronize(self) -> None:
        """Wait until the event is reached. ArgumentError while `graph` or `prepare` records."""
        refuse_recording("synchronize waits for the device")
        self.backend.reached(self._point("synchronize"), wait=True)

    def elapsed_time(self, stop: "Event") -> float:
        """Wait for both events and return the milliseconds from this one to `stop`, by the device's clock.

        On the emulator it is the host's clock. ArgumentError for an event of another device.
        """
        if not isinstance(stop, Event) or stop.backend is not self.backend:
            raise ArgumentError(f"Event.elapsed_time: stop is {stop!r}; pass an Event of the same device")
        self.synchronize()
        stop.synchronize()
        return stop._point("elapsed_time").milliseconds_after(self._point("elapsed_time"))

    def __repr__(self) -> str:
        return f"<event on {self.backend.describe()}{'' if self._event is not None else ', never recorded'}>"

    def __reduce__(self) -> Any:
        refuse_pickle(self, "make another Event")


def memory_info(*, device: int | None = None) -> MemoryInfo:
    """Return the bytes of the current machine that live arrays use, that are kept for reuse, that are free, and in
    total.

    The free bytes, as the driver reports them, exclude those kept for reuse; `trim_memory` returns these to the driver.
    """
    return place(device).memory_info()


def trim_memory(*, device: int | None = None) -> None:
    """Wait for the device and give all memory that is kept for reuse back to the driver.

    ArgumentError while `graph` or `prepare` records.
    """
    refuse_recording("trim_memory waits for the device")
    place(device).trim()


def current_device() -> int:
    """Return the number of the device that calls use now."""
    return current().ordinal
