"""`Staging`: page-locked memory of the host, through which small arrays go to a device without a wait, and back."""

from __future__ import annotations

import ctypes
from collections import deque
from contextlib import suppress
from threading import RLock
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from .backend import Queue


class Device(Protocol):
    """The interface of a device to its staging memory."""

    own_queue: Queue

    def page_locked(self, nbytes: int) -> int:
        """Allocate memory of the host that the device reads directly."""
        ...

    def copy_from_host(self, address: int, source: int, nbytes: int, queue: Queue) -> None:
        """Start a copy of the host's bytes at `source`."""
        ...

    def copy_to_host(self, target: int, address: int, nbytes: int, queue: Queue) -> None:
        """Start a copy to the host's bytes at `target`."""
        ...

    def wait_for(self, queue: Queue) -> None:
        """Wait for the queue's present work."""
        ...

    def record(self, queue: Queue, event: Any) -> Any:
        """Record the end of a queue in an event, or in a new one for None."""
        ...

    def reached(self, mark: Any, wait: bool = False) -> bool:
        """Wait for an event."""
        ...


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    """View bytes of the host."""
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


class Part:
    """A part of the memory, filled from its start on. events: one after the last copy from it in each queue. is_own:
    whether the device's own queue copies from it; its event is recorded when the part is full.
    """

    def __init__(self, start: int, memory: np.ndarray):
        self.start, self.memory, self.used = start, memory, 0
        self.events: list[Any] = []
        self.is_own = False
        self.latest: WeakKeyDictionary[Queue, Any] = WeakKeyDictionary()


class Staging:
    """Parts of page-locked memory, filled in turn. A part is filled again once all copies from it are done."""

    # Bytes of a part, and of the largest array that goes this way. The driver copies larger ones from pageable memory
    # about as fast.
    PARTS, PART, LARGEST, ALIGNMENT = 4, 1 << 18, 1 << 16, 64

    def __init__(self, device: Device):
        self._device = device
        self._turn = RLock()
        self._is_used = False
        self._parts: list[Part] = []  # the first one is being filled
        self._spare: deque[tuple[int, np.ndarray]] = deque()  # memory of LARGEST bytes for reads

    def write(self, address: int, host: np.ndarray, queue: Queue) -> None:
        """Start a copy of a contiguous array of at most LARGEST bytes to the device; `host` may change afterwards."""
        with self._turn:
            if self._is_used:  # by an outer call of this thread, in which the collector runs a finalizer
                self._device.copy_from_host(address, host.ctypes.data, host.nbytes, queue)
                self._device.wait_for(queue)
                return
            self._is_used = True
            try:
                self._write(address, host, queue)
            finally:
                self._is_used = False

    def _write(self, address: int, host: np.ndarray, queue: Queue) -> None:
        part = self._part(host.nbytes)
        used, nbytes = part.used, host.nbytes
        part.used += -(-nbytes // self.ALIGNMENT) * self.ALIGNMENT
        part.memory[used : used + nbytes] = host.reshape(-1).view(np.uint8)
        is_own = queue is self._device.own_queue
        part.is_own |= is_own  # it never ends, so that one event suffices, once the part is full
        try:
            self._device.copy_from_host(address, part.start + used, nbytes, queue)
            if is_own:
                return
            known = part.latest.get(queue)
            event = self._device.record(queue, known)
            if known is None:
                part.latest[queue] = event
                part.events.append(event)
        except BaseException:  # the part is filled again, and no event shows when
            with suppress(Exception):  # the driver has failed already
                self._device.wait_for(queue)
            raise

    def read(self, address: int, host: np.ndarray, queue: Queue) -> None:
        """Fill a contiguous array of at most LARGEST bytes from the device, after the queue's present work."""
        try:
            start, memory = self._spare.popleft()
        except IndexError:
            start = self._device.page_locked(self.LARGEST)
            memory = _bytes_at(start, self.LARGEST)
        try:
            self._device.copy_to_host(start, address, host.nbytes, queue)
            self._device.wait_for(queue)
            host.reshape(-1).view(np.uint8)[:] = memory[: host.nbytes]
        except BaseException:  # the copy may be under way
            with suppress(Exception):
                self._device.wait_for(queue)
                self._spare.append((start, memory))
            raise
        self._spare.append((start, memory))

    def _part(self, nbytes: int) -> Part:
        """Return the part that has room for `nbytes`."""
        if not self._parts:
            start = self._device.page_locked(self.PART * self.PARTS)
            for place in range(start, start + self.PART * self.PARTS, self.PART):
                self._parts.append(Part(place, _bytes_at(place, self.PART)))
        if self._parts[0].used + nbytes > self.PART:
            full, oldest = self._parts[:2]
            if full.is_own:
                full.events.append(self._device.record(self._device.own_queue, None))
            for event in oldest.events:
                self._device.reached(event, wait=True)
            self._parts = [Part(oldest.start, oldest.memory), *self._parts[2:], self._parts[0]]
        return self._parts[0]
