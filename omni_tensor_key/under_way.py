"""The calls of other people's functions that were running at one moment, until they are over."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator


class CallsUnderWay:
    """The calls of a module's functions that run when this is made.

    They may have looked up what has been replaced since, and go on with it. Keeps neither the calls nor what they
    refer to alive.
    """

    def __init__(self, module: types.ModuleType) -> None:
        self._globals = vars(module)
        self._threads = {thread for thread, count in self._calls().items() if count > 0}

    def _calls(self) -> dict[int, int]:
        """By thread, how many calls of the module's functions it is in."""
        return {
            thread: sum(frame.f_globals is self._globals for frame in _stack(innermost))
            for thread, innermost in sys._current_frames().items()
        }

    def remain(self) -> bool:
        """Whether there are some left, apart from the one that asks.

        To be asked by what a function of the module calls, on that function's own thread. A thread that has come to
        another call since counts as before until it asks too or is seen outside: in doubt, it is the same call.
        """
        if self._threads:
            calls = self._calls()
            calls[threading.get_ident()] -= 1
            self._threads &= {thread for thread, count in calls.items() if count > 0}  # others do so at the same time
        return bool(self._threads)


def _stack(innermost: types.FrameType | None) -> Iterator[types.FrameType]:
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back
