"""Programs on devices: by stand-ins for ssh, scp and adb, under qemu-user, and on this machine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from fake_remotes import write_fakes

from apq_tvm.bench.emulator import COMPILERS, EMULATORS
from apq_tvm.codegen.build.toolchain import run
from apq_tvm.errors import (
    BadInput,
    BadTarget,
    DeviceFailed,
    DeviceLost,
    DeviceToolMissing,
    DeviceUnfit,
    DeviceUnreachable,
    HostKeyRefused,
)
from apq_tvm.schedules.devices import find_profile
from apq_tvm.tune.device import TIMED_OUT, Job
from apq_tvm.tune.devices import open_devices
from apq_tvm.tune.devices.address import parse_device
from apq_tvm.tune.devices.bundle import run_bundle
from apq_tvm.tune.devices.connection import Connection, toolchain
from apq_tvm.tune.devices.errand import Errand
from apq_tvm.tune.devices.machine import HWCAPS, Machine, check_fit, fitting, parse_facts
from apq_tvm.tune.devices.remote import RemoteDevice

ROOT = Path(__file__).resolve().parents[3]
HOST = os.uname().machine
TARGET = "x86-64" if HOST == "x86_64" else "armv8-a"
PROFILE = find_profile(TARGET)

SCRIPT = b"""#!/bin/sh
case "$(cat "$1")" in
  crash) kill -SEGV $$ ;;
  hang) echo at 1; sleep 60 ;;
  seven) echo sorry >&2; exit 7 ;;
  *) echo at 0; echo "said $2"; cat "$1" > out ;;
esac
"""

WAYS = ("local", "ssh://pi@board", "adb://phone", "adb://old")


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins first on PATH; the folder with what they were asked."""
    write_fakes(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_BASE", str(tmp_path / "there"))
    (tmp_path / "there").mkdir()
    return tmp_path


def address(way: str, folder: Path) -> str:
    """ssh's working folder is below the test's, so that what is left there is seen."""
    return f"{way}{folder}/there" if way.startswith("ssh") else way


def errand(word: str, timeout_s: float = 20.0) -> Errand:
    return Errand(
        {"program": SCRIPT, "in": word.encode()}, ("program", "in", "x=1"), ("out", "none"),
        timeout_s,
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_errands_are_run_and_nothing_stays_behind(way: str, fakes: Path) -> None:
    heard: list[str] = []
    with Connection(parse_device(address(way, fakes)), PROFILE) as device:
        assert device.machine.arch == HOST and device.machine.cores >= 1
        done = device.run(errand("fine"), heard.append)
        assert (done.status, done.code) == ("exit", 0)
        assert done.stdout.split() == ["at", "0", "said", "x=1"]
        assert heard[:2] == ["at 0", "said x=1"]
        assert done.files == {"out": b"fine"} and not done.emulated
        done.check()
        seven = device.run(errand("seven"))
        assert (seven.status, seven.code) == ("exit", 7)
        with pytest.raises(BadInput, match=r"ended with 7 on .*sorry"):
            seven.check()
        crash = device.run(errand("crash"))
        assert (crash.status, crash.code) == ("signal", 11)
        with pytest.raises(BadInput, match="signal 11"):
            crash.check()
        left = [p for p in (fakes / "there").rglob("*") if p.is_file()]
        assert [p.name for p in left] == ([] if way == "local" else ["agent"])
    assert not list((fakes / "there").iterdir())


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_hangs_is_ended(way: str, fakes: Path) -> None:
    heard: list[str] = []
    with Connection(parse_device(address(way, fakes)), PROFILE) as device:
        done = device.run(errand("hang", 0.3), heard.append)
    assert done.status == "timeout" and heard[0] == "at 1"
    with pytest.raises(BadInput, match="still running after"):
        done.check()


@pytest.mark.parametrize(
    ("way", "error", "text"),
    [
        ("ssh://changed", HostKeyRefused, "another one.*ssh-keygen -R changed"),
        ("ssh://changed:2222", HostKeyRefused, r"ssh-keygen -R '\[changed\]:2222'"),
        ("ssh://unknown", HostKeyRefused, "not known here.*ssh unknown"),
        ("ssh://pi@denied", DeviceUnreachable, "ssh-copy-id pi@denied"),
        ("ssh://away", DeviceUnreachable, "Connection refused.*ssh away"),
        ("ssh://board/no/such/folder", DeviceUnfit, "mktemp"),
        ("adb://gone", DeviceUnreachable, "not found; adb devices"),
        ("adb://shy", DeviceUnreachable, "has not allowed this machine"),
        ("rpc://127.0.0.1:1/pi", DeviceUnreachable, "no tracker answers.*rpc_tracker"),
    ],
)
def test_devices_that_cannot_be_used_say_why(
    way: str, error: type[DeviceFailed], text: str
) -> None:
    with pytest.raises(error, match=text):
        open_devices(way, PROFILE)


@pytest.mark.parametrize("program", ["ssh", "scp", "adb"])
def test_missing_programs_are_named(
    program: str, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = "adb://phone" if program == "adb" else "ssh://board"
    tools = toolchain(PROFILE)
    Connection(
        parse_device("local"), PROFILE, tools
    ).close()  # compiles the agent, with all of PATH
    (fakes / "bin" / program).unlink()
    monkeypatch.setenv("PATH", str(fakes / "bin"))
    with pytest.raises(DeviceToolMissing, match=f"{program} is not on PATH.*apt-get"):
        Connection(parse_device(way), PROFILE, tools)


def test_one_bad_device_does_not_stop_the_others() -> None:
    remarks: list[str] = []
    devices = open_devices("ssh://away,local", PROFILE, remark=remarks.append)
    assert [device.name for device in devices] == ["local"]
    assert len(remarks) == 1 and remarks[0].endswith("going on without it")
    devices[0].close()


def test_words_for_ssh_and_adb_are_arguments(fakes: Path) -> None:
    """Whatever a path on this machine is called, the device hears of names of ours alone."""
    odd = fakes / "a model; $(reboot) 'x'"
    odd.write_bytes(SCRIPT)
    for way in ("ssh://board", "adb://phone"):
        with Connection(parse_device(address(way, fakes)), PROFILE) as device:
            device.run(Errand({"program": odd, "in": b"fine"}, ("program", "in", "y")))
            with pytest.raises(ValueError, match="may not stand"):
                device.run(Errand({"program": odd}, ("program", "$(reboot)")))
    assert "reboot" not in (fakes / "log").read_text().replace(str(odd), "")


# ---- bundles for GPUs ----

RUN = """import json, sys
from pathlib import Path
print("case 1", flush=True)
here = Path(__file__).parent
names = sorted(p.relative_to(here).as_posix() for p in here.rglob("*") if p.suffix != ".pyc")
out = Path(sys.argv[sys.argv.index("--out") + 1])
out.write_text(json.dumps({"names": names, "words": sys.argv[1:]}))
sys.exit(json.loads((here / "bundle.json").read_text())["exit"])
"""


@pytest.mark.parametrize("way", ["local", "ssh://gpu"])
@pytest.mark.parametrize("code", [0, 1])
def test_a_bundle_runs_where_there_is_a_gpu(way: str, code: int, fakes: Path) -> None:
    bundle, heard = fakes / "a bundle", list[str]()
    (bundle / "images").mkdir(parents=True)
    (bundle / "images" / "a.sm_90").write_bytes(b"image")
    (bundle / "run.py").write_text(RUN)
    target = "h200" if HOST == "x86_64" else "jetson-agx-orin"
    (bundle / "bundle.json").write_text(json.dumps({"target": target, "exit": code}))
    (bundle / "results.json").write_text("old")
    device = address(way, fakes)
    if code:
        with pytest.raises(BadInput, match=r"run.py ended with 1"):
            run_bundle(bundle, device)
    else:
        results = run_bundle(bundle, device, seconds=2, on_line=heard.append)
        assert {"images/a.sm_90", "bundle.json", "run.py"} <= set(results["names"])
        assert results["words"] == ["--seconds", "2", "--out", "results.json"]
        assert heard[0] == "case 1" and "results.json" not in results["names"]
    assert "names" in json.loads((bundle / "results.json").read_text())
    assert not list((fakes / "there").iterdir())


def test_what_is_no_bundle_or_has_no_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no bundle"):
        run_bundle(tmp_path, "local")
    for way in ("qemu://max", "rpc://box:9190/gpu", "adb://phone"):
        with pytest.raises(BadInput, match="local, or ssh"):
            run_bundle(tmp_path, way)


# ---- what the tuner sees ----


def job(folder: Path, word: str, seconds: float = 20.0) -> Job:
    program, data = folder / "a program", folder / f"{word}.data"
    program.write_bytes(SCRIPT)
    data.write_bytes(word.encode())
    return Job(program, data, ("check=1",), seconds)


def transfers(fakes: Path) -> int:
    return sum(line.startswith("scp") for line in (fakes / "log").read_text().splitlines())


def test_a_device_of_the_tuner_keeps_data_until_it_is_forgotten(fakes: Path) -> None:
    (device,) = open_devices(address("ssh://board", fakes), PROFILE)
    assert device.speed and device.cold_bytes > 0 and "core" in device.describe()
    fine = job(fakes, "fine")
    heard: list[str] = []
    outcome = device.run(fine, heard.append)
    assert (outcome.code, outcome.lines[:2]) == (0, ("at 0", "said check=1"))
    assert heard[:2] == ["at 0", "said check=1"]
    names = {p.name for p in (fakes / "there").rglob("*") if p.is_file()}
    assert names == {"agent", "data1", "out"}  # `out` is no output that the tuner names
    device.run(fine)
    sent = [line for line in (fakes / "log").read_text().splitlines() if "data1" in line]
    assert sum(line.startswith("scp") for line in sent) == 1
    device.forget(fine.data)
    assert not list((fakes / "there").rglob("data1"))
    device.forget(fine.data)
    assert device.run(job(fakes, "crash")).code == -11
    assert device.run(job(fakes, "hang", 0.2)).code == TIMED_OUT
    seven = device.run(job(fakes, "seven"))
    assert (seven.code, seven.errors.strip()) == (7, "sorry")
    device.close()
    assert not list((fakes / "there").iterdir())


def test_a_device_that_dies_costs_one_job(fakes: Path) -> None:
    (device,) = open_devices(address("ssh://board", fakes), PROFILE)
    fine = job(fakes, "fine")
    assert device.run(fine).code == 0
    (fakes / "die").touch()
    with pytest.raises(DeviceLost, match="Broken pipe"):
        device.run(fine)
    assert device.run(fine).code == 0  # opened again, its data sent again
    for _ in range(3):
        (fakes / "die").touch()
        with pytest.raises(DeviceLost):
            device.run(fine)
    with pytest.raises(DeviceLost, match="given up"):
        device.run(fine)
    device.forget(fine.data)
    device.close()


# ---- the emulator, and features ----

needs_arm = pytest.mark.skipif(
    not (shutil.which(COMPILERS["aarch64"]) and shutil.which(EMULATORS["aarch64"])),
    reason="no cross compiler for 64-bit Arm, or no qemu-user",
)


@needs_arm
def test_the_emulator_is_marked_and_has_the_features_of_its_processor(tmp_path: Path) -> None:
    source, program = tmp_path / "p.c", tmp_path / "p"
    source.write_text(
        "#include <stdio.h>\nint main(int c, char **v) { return puts(v[c - 1]) < 0; }"
    )
    run([COMPILERS["aarch64"], "-static", str(source), "-o", str(program)])
    device = RemoteDevice(parse_device("qemu://cortex-a76"), find_profile("cortex-a76"))
    assert not device.speed and device.describe() == "emulated cortex-a76: aarch64"
    data = tmp_path / "d"
    data.write_bytes(b"")
    assert device.run(Job(program, data, ("check=1",), 10.0)).lines == ("check=1",)
    device.check(["neon", "dotprod"])
    with pytest.raises(DeviceUnfit, match="lacks i8mm"):
        device.check(["i8mm"])
    device.close()
    with pytest.raises(DeviceUnfit, match=r"lacks .*i8mm.*--target"):
        RemoteDevice(parse_device("qemu://cortex-a76"), find_profile("graviton3"))
    with pytest.raises(BadTarget, match="64-bit Arm"):
        RemoteDevice(parse_device("qemu://max"), find_profile("znver4"))


def test_the_table_of_features_is_the_runtimes() -> None:
    import re

    text = (ROOT / "codegen" / "runtime" / "cpu" / "machine.c").read_text()
    table = re.findall(r'\{"(\w+)", (\d), (\d+)\}', text)
    assert {name: (int(word), int(bit)) for name, word, bit in table} == HWCAPS


def test_facts_and_fit() -> None:
    facts = "arch: aarch64\nsystem: Linux 6\ncores: 4\nhwcap: {}\nhwcap2: 0\nCPU part: 0xd0b\n"
    bits = sum(
        1 << HWCAPS[name][1] for name in ("asimd", "atomics", "asimdrdm", "asimddp", "asimdhp")
    )
    machine = parse_facts(facts.format(bits), "ssh://pi")
    assert machine.model == "0xd0b" and machine.flags >= {"asimddp", "atomics"}
    check_fit(machine, find_profile("cortex-a76"), "ssh://pi")
    check_fit(machine, find_profile("arm-auto"), "ssh://pi")  # one of its variants
    assert fitting(machine)
    with pytest.raises(DeviceUnfit, match="ssh://pi is aarch64, and target znver4 is x86_64"):
        check_fit(machine, find_profile("znver4"), "ssh://pi")
    with pytest.raises(DeviceUnfit, match=r"lacks .*i8mm.*graviton3 uses"):
        check_fit(machine, find_profile("graviton3"), "ssh://pi")
    with pytest.raises(DeviceLost, match="the agent said"):
        parse_facts("Welcome!", "ssh://pi")


def test_tiles_count_only_where_a_process_gets_them() -> None:
    text = (
        "arch: x86_64\nsystem: L\ncores: 1\nhwcap: 2\nhwcap2: 2\nflags: sse2 amx_tile\ntiles: {}\n"
    )
    assert "amx_tile" in parse_facts(text.format(1), "d").flags
    assert "amx_tile" not in parse_facts(text.format(0), "d").flags
    assert isinstance(parse_facts(text.format(0), "d"), Machine)
