"""TVM's tracker and its servers: the real ones where they can be started, else what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apq_tvm.errors import DeviceFailed, DeviceLost, DeviceUnfit, DeviceUnreachable, UnknownKey
from apq_tvm.schedules.devices import find_profile
from apq_tvm.tune.device import TIMED_OUT, Job
from apq_tvm.tune.devices import open_devices
from apq_tvm.tune.devices.address import Address
from apq_tvm.tune.devices.tracker import TRACKER_MAGIC, Tracker, expand

TARGET = "x86-64" if os.uname().machine == "x86_64" else "armv8-a"
OTHER = "armv8-a" if TARGET == "x86-64" else "x86-64"


# ---- what a tracker says, without one ----


def served(answer: Callable[[Any], bytes], magic: int = TRACKER_MAGIC) -> Address:
    """A stand-in for a tracker: `answer` of each message, as bytes behind their length."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4)
                connection.sendall(struct.pack("<i", magic))
                while size := connection.recv(4):
                    message = json.loads(connection.recv(struct.unpack("<i", size)[0]))
                    data = answer(message)
                    connection.sendall(struct.pack("<i", len(data)) + data)

    threading.Thread(target=serve, daemon=True).start()
    return Address("rpc", "127.0.0.1", port=listener.getsockname()[1], name="pi")


def summary(*keys: str) -> bytes:
    infos = [{"key": f"server:{key}", "addr": ["x", 1]} for key in keys]
    return json.dumps([0, {"server_info": infos, "queue_info": {}}]).encode()


def test_a_key_stands_for_all_its_servers() -> None:
    address = served(lambda message: summary("pi", "phone", "pi"))
    assert expand([address, Address("local")]) == [address, address, Address("local")]


@pytest.mark.parametrize(("keys", "have"), [((), "no device at all"), (("b", "a"), "a, b")])
def test_an_unknown_key_is_named_with_those_there_are(keys: tuple[str, ...], have: str) -> None:
    address = served(lambda message: summary(*keys))
    with pytest.raises(UnknownKey, match=f"no device of key 'pi'; it has {have}"):
        open_devices(str(address), find_profile(TARGET))


def test_what_is_no_tracker_is_told() -> None:
    with pytest.raises(DeviceUnreachable, match="no tracker"):
        Tracker(served(lambda message: b"", magic=7))


@pytest.mark.parametrize("data", [b"{", b"[]", b"[-1]", b"[5, {}]", b"7", b"null", b"[0, 7]"])
def test_odd_answers_are_errors_of_the_device(data: bytes) -> None:
    tracker = Tracker(served(lambda message: data))
    with pytest.raises(DeviceLost):
        tracker.servers()


def test_a_device_that_others_use_is_not_waited_for_for_ever() -> None:
    def answer(message: Any) -> bytes:
        time.sleep(1.0)
        return b"[0, []]"

    with pytest.raises(DeviceLost, match="became free"):
        Tracker(served(answer)).request(wait_s=0.1)


# ---- the real ones ----


@pytest.fixture(scope="module")
def fleet() -> Iterator[str]:
    """A tracker with two servers, processes of their own."""
    for package in ("tornado", "psutil", "cloudpickle"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"TVM's tracker and servers need {package}: pip install 'apq-tvm[tune]'")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        command = [sys.executable, "-m", *words]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
        started.append(process)

    ports = "--port", str(port), "--port-end", str(port + 1)
    start("tvm.exec.rpc_tracker", "--host", "127.0.0.1", *ports)
    address = Address("rpc", "127.0.0.1", port=port, name="here")
    try:
        until = time.monotonic() + 120
        where = "--tracker", f"127.0.0.1:{port}", "--key", "here"
        for i in range(2):
            mine = str(port + 10 + 100 * i), "--port-end", str(port + 110 + 100 * i)
            start("tvm.exec.rpc_server", "--host", "127.0.0.1", "--port", *mine, *where)
        while True:
            try:
                if len(expand([address])) == 2:
                    break
            except DeviceFailed:
                pass
            if time.monotonic() > until:
                pytest.skip("TVM's tracker and servers did not start")
            time.sleep(0.5)
        yield str(address)
    finally:
        for process in started:
            try:
                os.killpg(process.pid, 9)
            except ProcessLookupError:
                pass
            process.wait()


SCRIPT = """#!/bin/sh
case "$(cat "$1")" in
  crash) kill -SEGV $$ ;;
  hang) sleep 60 ;;
  *) echo "at $2"; sleep 0.5; echo "said $(pwd)" ;;
esac
"""


@pytest.mark.slow
def test_two_servers_of_a_tracker_work_side_by_side(fleet: str, tmp_path: Path) -> None:
    devices = open_devices(fleet, find_profile(TARGET))
    assert [device.name for device in devices] == [fleet, fleet]
    program = tmp_path / "program"
    program.write_text(SCRIPT)

    def job(word: str, seconds: float = 20.0) -> Job:
        data = tmp_path / word
        data.write_text(word)
        return Job(program, data, ("check=1",), seconds)

    places: list[str] = []
    heard: list[str] = []

    def work(i: int) -> None:
        outcome = devices[i].run(job("fine"), heard.append)
        assert outcome.code == 0 and outcome.lines[0] == "at check=1"
        places.append(outcome.lines[1])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(places)) == 2 and len(heard) == 4  # each server has a folder of its own
    assert devices[0].run(job("crash")).code == -11
    assert devices[0].run(job("hang", 0.3)).code == TIMED_OUT
    assert devices[0].run(job("fine")).code == 0
    # The session's process dies as when the network does: one job is lost, the next one goes on.
    session = devices[1]._held[0].transport._process  # type: ignore[attr-defined]
    session.kill()
    with pytest.raises(DeviceLost, match="was lost"):
        devices[1].run(job("fine"))
    assert devices[1].run(job("fine")).code == 0
    for device in devices:
        device.close()


@pytest.mark.slow
def test_a_server_of_another_architecture_is_named(fleet: str) -> None:
    from apq_tvm.errors import BuildError

    try:
        with pytest.raises(DeviceUnfit, match="architecture"):
            open_devices(fleet, find_profile(OTHER))
    except BuildError as error:
        pytest.skip(f"no cross compiler: {error}")
