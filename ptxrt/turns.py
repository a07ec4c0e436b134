"""A lock for one machine, the work that finalizers leave for its next owner, and the true end of an object.

The garbage collector runs finalizers at any statement, in a thread that may hold any lock. A finalizer therefore takes
no lock and calls no driver: it leaves what it gives back with a `Turn`.

The collector also runs the finalizers of all garbage before it checks whether one of them has revived an object: memory
that waits for its last uses revives the stream or event that tells of them. What must not end before its object is
therefore left to an `End`, which the object's finalizer makes.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import WeakSet

from .errors import MachineError

FORKED = (
    "this process was forked from one that used the machine, whose state is not known here; start processes with the "
    "start method spawn, or fork before the first use (of an emulator: while nothing runs)"
)


class End:
    """An action at the true end of an object. The object's finalizer makes it and the object alone holds it."""

    __slots__ = ("_action", "_arguments")

    def __init__(self, action: Callable[..., Any], *arguments: Any):
        self._action, self._arguments = action, arguments

    def __del__(self, is_finalizing=sys.is_finalizing):
        # At interpreter exit drivers and lenders may be gone already; their memory ends with the process.
        if not is_finalizing():
            self._action(*self._arguments)


class Turn:
    """A lock that a thread may take several times. Taking it first settles what finalizers have left.

    settle: handles each thing that was left; the thread that takes the lock calls it, never within another turn of it.
    survives_fork: whether a process that is forked while nobody has the turn may go on.
    """

    def __init__(self, settle: Callable[[Any], None], survives_fork: bool = False):
        self.left: deque[Any] = deque()
        self.survives_fork = survives_fork
        self._settle = settle
        self._lock = RLock()
        self._depth = 0
        self._lost = False
        _turns.add(self)

    def leave(self, item: Any) -> None:
        """Leave something to be settled later. Finalizers call this; it is one append, which is atomic."""
        self.left.append(item)

    def settle(self) -> None:
        """Settle what was left, unless another thread has the turn, or this one further out."""
        if self.left and self._lock.acquire(blocking=False):
            try:
                if not self._depth and not self._lost:
                    with self:
                        pass
            finally:
                self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._lost:
            self._lock.release()
            raise MachineError(FORKED)
        self._depth += 1
        if self._depth == 1 and self.left:
            try:
                for _ in range(len(self.left)):  # things left meanwhile wait for the next turn
                    self._settle(self.left.popleft())
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *exception) -> None:
        self._depth -= 1
        self._lock.release()

    def is_taken(self) -> bool:
        """Return whether another thread has the turn."""
        free = self._lock.acquire(blocking=False)
        if free:
            self._lock.release()
        return not free

    def lose(self) -> None:
        """Refuse every further turn: in a forked process, where the thread that had one does not exist."""
        self._lock, self._depth, self._lost = RLock(), 0, True


_turns: WeakSet[Turn] = WeakSet()


def _after_fork() -> None:
    """Refuse in a forked process what cannot be known there.

    Machines share translations of kernels. If another thread was using one, none of them may be used.
    """
    turns = list(_turns)
    in_use = any(turn.is_taken() for turn in turns)
    for turn in turns:
        if in_use or not turn.survives_fork:
            turn.lose()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
