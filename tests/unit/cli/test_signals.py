"""Signals that ask to stop: what they raise, and what holds them back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from apq_tvm import signals
from apq_tvm.files import replacing


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handlers as at the start of a program; those of the test's own process come back."""
    monkeypatch.setattr(signals, "_stopped", [])
    before = {number: signal.getsignal(number) for number in signals.STOPS}
    for number in signals.STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", signals.STOPS)
def test_a_signal_interrupts_and_is_remembered(number: int) -> None:
    signals.unwind_on_signals()
    assert signals.stopped_by() == 0
    with pytest.raises(KeyboardInterrupt):
        send(number)
    assert signals.stopped_by() == number
    send(signal.SIGTERM)  # again: the cleaning up goes on
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)  # Ctrl-C means at once
    assert signals.stopped_by() == number


def test_a_later_signal_stops_what_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception may have been swallowed; the process can still be ended by a signal."""
    signals.unwind_on_signals()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    signals.unwind_on_signals()
    send(signal.SIGHUP)
    assert signals.stopped_by() == 0


@pytest.mark.parametrize("number", signals.STOPS)
def test_deferred_until_asked_for(number: int) -> None:
    signals.unwind_on_signals()
    handlers = [signal.getsignal(n) for n in signals.STOPS]
    done = []
    with pytest.raises(KeyboardInterrupt), signals.deferred() as held:
        send(number)
        done.append("went on")
        assert held.asked == number
        held.stop()
    assert done == ["went on"] and signals.stopped_by() == number
    assert [signal.getsignal(n) for n in signals.STOPS] == handlers


def test_the_second_ctrl_c_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), signals.deferred():
        send(signal.SIGINT)
        send(signal.SIGINT)


def test_a_library_leaves_other_signals_alone() -> None:
    with signals.deferred():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_another_thread_defers_nothing() -> None:
    seen = []

    def work() -> None:
        with signals.deferred() as held:
            seen.append(held.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as part:
        part.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
