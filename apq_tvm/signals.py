"""Signals that ask a command to stop unwind it, so that nothing half made stays behind.

Ctrl-C does so by itself. SIGTERM (``kill``, ``timeout``, a container that ends) and SIGHUP (a
terminal that closes) would end the process at once, and leave its temporary folders.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

GRACE_SECONDS = 10.0
"""In which a second SIGTERM changes nothing: ``timeout`` sends one to the process, then one to its
group, and the second would interrupt the cleaning up after the first."""

_stopped: list[tuple[int, float]] = []  # the first signal and when it came


def unwind_on_signals() -> None:
    """Let every signal of `STOPS` raise KeyboardInterrupt; one that is ignored stays so (nohup)."""
    for number in STOPS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)


def stopped_by() -> int:
    """The signal that `unwind_on_signals` met, 0 if none came.

    What was raised may have become another exception on its way through TVM's callbacks.
    """
    return _stopped[0][0] if _stopped else 0


def _stop(number: int, _: FrameType | None) -> None:
    if not _stopped:
        _stopped.append((number, time.monotonic()))
    elif number != signal.SIGINT and time.monotonic() - _stopped[0][1] < GRACE_SECONDS:
        return
    raise KeyboardInterrupt


class Deferred:
    """A signal that came inside `deferred` and waits for a good moment."""

    def __init__(self) -> None:
        self.asked: int = 0
        """Its number; 0 if none came."""
        self._before: dict[int, Any] = {}

    def stop(self) -> NoReturn:
        """Do now what the signal would have done."""
        handler = self._before.get(self.asked)
        if callable(handler):
            handler(self.asked, None)
        raise KeyboardInterrupt

    def _note(self, number: int, _: FrameType | None) -> None:
        again = bool(self.asked)
        self.asked = self.asked or number
        if again and number == signal.SIGINT:
            self.stop()


@contextmanager
def deferred() -> Iterator[Deferred]:
    """Hold back Ctrl-C, and other signals that are handled at all, until the body looks at it.

    A second Ctrl-C stops at once. Outside the main thread, which signals go to, none comes.
    """
    held = Deferred()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    for number in STOPS:
        handler = signal.getsignal(number)
        if number == signal.SIGINT or callable(handler):
            held._before[number] = signal.signal(number, held._note)
    try:
        yield held
    finally:
        for changed, handler in held._before.items():
            signal.signal(changed, handler)
