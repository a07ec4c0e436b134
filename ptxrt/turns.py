"""`Turn`, a lock whose next owner does the work that finalizers leave, and `End`, an action at the end of an object.

The garbage collector runs finalizers at any statement, in a thread that may hold any lock. A finalizer therefore takes
no lock and calls no driver: it leaves the resources that it releases with a `Turn`.

The collector runs the finalizers of all garbage before it checks whether one of them has revived an object. Freed
memory revives in this way the streams and events of its last uses. A resource that must live as long as its object is
therefore released by an `End`, which the object's finalizer makes.
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
    """An action at the end of an object, after any revival. The object's finalizer makes it, and only the object
    refers to it.
    """

    __slots__ = ("_action", "_arguments")

    def __init__(self, action: Callable[..., Any], *arguments: Any):
        self._action, self._arguments = action, arguments

    def __del__(self, is_finalizing=sys.is_finalizing):
        # At interpreter exit drivers and lenders may be gone already; their memory ends with the process.
        if not is_finalizing():
            self._action(*self._arguments)


class Turn:
    """A reentrant lock. A thread that takes it first settles the items that finalizers have left.

    settle: handles one item, or leaves it again if it fails before it has done anything. The thread that takes the lock
    calls it, never in a nested turn. survives_fork: whether a forked process may use the lock if no other thread had it
    at the fork.
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
        """Leave an item to be settled later. Finalizers call this; it is one append, which is atomic."""
        self.left.append(item)

    def settle(self) -> None:
        """Settle the items that were left, unless another thread, or an outer call of this one, has the turn."""
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
                for _ in range(len(self.left)):  # items left meanwhile wait for the next turn
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
        """Refuse every further turn. Forked processes need this: the thread that had the turn does not exist there."""
        self._lock, self._depth, self._lost = RLock(), 0, True


_turns: WeakSet[Turn] = WeakSet()


def _after_fork() -> None:
    """Refuse the turns whose state is unknown in a forked process.

    Machines share translations of kernels. If another thread had any turn, all turns are refused.
    """
    turns = list(_turns)
    in_use = any(turn.is_taken() for turn in turns)
    for turn in turns:
        if in_use or not turn.survives_fork:
            turn.lose()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
