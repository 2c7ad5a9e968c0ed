"""Bundles of ``bench gpu --prepare``, run as on a machine with a GPU: no apq_tvm there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from apq_tvm.bench.gpu import bundle as bundles
from apq_tvm.bench.gpu import rates as kinds_of_mma
from apq_tvm.bench.gpu.bundle import prepare
from apq_tvm.bench.gpu.on_gpu import timing
from apq_tvm.bench.gpu.on_gpu.driver import Gpu, Memory
from apq_tvm.bench.gpu.on_gpu.layer import Case, Layer, copies_of
from apq_tvm.bench.gpu.sass import disassemble
from apq_tvm.bench.linear import LinearCase
from apq_tvm.cli.main import app
from apq_tvm.codegen.cuda.compilers import find_compiler
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.errors import BadInput, BadTarget, BuildError, OutputExists, OutputFailed
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.recorded import Records
from apq_tvm.select import by_name
from apq_tvm.tune.gpu.candidates import searched
from apq_tvm.tune.gpu.results import import_results
from apq_tvm.tune.logs import spec_of
from apq_tvm.tuning_logs.records import read_records

COLUMNS = {
    "shape", "m", "scheme", "kernel", "us", "error", "bandwidth_share", "static_us", "rival_us",
    "ratio", "noise",
}  # fmt: skip
SCHEMES = ("W4A8g32", "W8A8")
OURS = ("apq_tvm", "tvm", "onnx", "typer")
"""What a machine with a GPU has not."""

FAKE_TORCH = '''
"""What a rival takes of torch, where nothing is a GPU."""
import sys
from contextlib import contextmanager
import numpy as np
__version__, float16 = "0.0", np.float16
calls = []
class Tensor(np.ndarray):
    def t(self):
        return self.T
def randn(*shape, dtype, device):
    assert device == "cuda"
    return np.zeros(shape, dtype).view(Tensor)
empty = randn
def mm(x, w, out):
    {fails}
    calls.append((x.shape, w.shape, out.shape))
class cuda:
    class Stream:
        def synchronize(self): pass
    class CUDAGraph:
        def replay(self): pass
    is_available = staticmethod(lambda: True)
    synchronize = staticmethod(lambda: None)
    empty_cache = staticmethod(lambda: None)
    @staticmethod
    @contextmanager
    def stream(stream): yield
    graph = stream
version = cuda
cuda.cuda = "0.0"
'''


def case(n: int, k: int, m: int, scheme: str) -> LinearCase:
    return LinearCase(n, k, m, scheme, threads=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for ``rtx-3090``: 64 and 40 rows of weights, 1 and 9 of x."""
    folder = tmp_path_factory.mktemp("made") / "bundle"
    cases = [case(n, 256, m, scheme) for n in (64, 40) for scheme in SCHEMES for m in (1, 9)]
    report = prepare(cases, folder, target="rtx-3090", images=Simulator())
    assert report["bytes"] == sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    return folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy of it, where nothing of ours can be imported."""
    folder = tmp_path / "bundle"
    shutil.copytree(made, folder)
    for name in (*OURS, "torch"):
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is not here')\n")
    return folder


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(driver: Path, tmp_path: Path) -> Run:
    """``python bundle/run.py`` on a simulated GPU as the environment says."""

    def start(
        folder: Path, *words: str, env: Mapping[str, str] | None = None, with_driver: bool = True
    ) -> subprocess.CompletedProcess[str]:
        path = {"LD_LIBRARY_PATH": str(driver)} if with_driver else {}
        return subprocess.run(
            [sys.executable, "-I", str(folder / "run.py"), "--small", *words],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], **path, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )

    return start


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert {path.name for path in folder.iterdir() if path.name.startswith(".")} == set()
    return found


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change ``bundle.json``."""
    path = folder / "bundle.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# ---- what is measured ----


def test_rows_are_complete_and_right(bundle: Path, run: Run) -> None:
    done = run(bundle)
    assert done.returncode == 0, done.stderr
    found = results(bundle)
    assert (
        found["complete"] and found["skipped"] == [] and found["rival"] == "torch is not installed"
    )
    assert found["gpu"] == "simulated GPU 0" and found["compute_capability"] == 86
    rates = found["rates"]
    assert rates["copy_gbs"] > 0 and rates["read_gbs"] > 0
    assert set(rates["mma_tmacs"]) == {
        "s8 m16n8k32", "f16 m16n8k16", "b1_and m16n8k256", "b1_xor m16n8k256", "s4 m16n8k64",
    }  # fmt: skip
    rows = found["rows"]
    assert len(rows) == 8 and all(set(row) >= COLUMNS for row in rows)
    assert {(row["shape"], row["m"], row["scheme"]) for row in rows} == {
        (shape, m, scheme) for shape in ("64x256", "40x256") for m in (1, 9) for scheme in SCHEMES
    }
    for row in rows:
        assert row["error"] < row["bound"] and not row["wrong"] and not row["failed"], row
        assert 0 < row["rounding_error"] < 0.02, row  # that of int8 activations
        assert row["us"] > 0 and row["product_us"] > 0 and row["bandwidth_share"] > 0, row
        assert row["kernel"].startswith("gemv" if row["m"] == 1 else "gemm"), row
        assert row["rival_us"] is None and row["ratio"] is None and row["static_us"] is None, row


FORMATS = {
    "rtx-2080": ("W3zA8g64", "W1A4"),
    "rtx-3090": ("W4A8tg64", "W4A1g32", "anyprec3-8@3", "W2*A8", "cb2", "float"),
}


@pytest.mark.parametrize("target", FORMATS)
def test_layers_of_any_format(target: str, run: Run, tmp_path: Path) -> None:
    """Rows and columns that are not whole blocks; weights as every family has them."""
    folder, schemes = tmp_path / "bundle", FORMATS[target]
    cases = [case(70, 336, 3, scheme) for scheme in schemes]
    prepare(cases, folder, target=target, images=Simulator())
    done = run(folder, env={"CUSIM_SM": str(find_profile(target).gpu.sm)})
    rows = results(folder)["rows"]
    assert done.returncode == 0 and {row["scheme"] for row in rows} == {*schemes}, done.stderr
    assert all(row["error"] < row["bound"] for row in rows), rows


def with_torch(folder: Path, fails: str = "pass") -> None:
    (folder / "torch.py").write_text(FAKE_TORCH.replace("{fails}", fails))


def test_the_rival_takes_turns(bundle: Path, run: Run) -> None:
    with_torch(bundle)
    done = run(bundle, "--only", "64x256")
    assert done.returncode == 0, done.stderr
    found = results(bundle)
    assert found["rival"] == "torch 0.0, cuBLAS of CUDA 0.0, float16" and len(found["rows"]) == 4
    for row in found["rows"]:
        assert row["ratio"] == pytest.approx(row["rival_us"] / row["us"]) and row["rival_us"] > 0


def test_a_rival_that_fails_costs_only_itself(bundle: Path, run: Run) -> None:
    with_torch(bundle, "raise RuntimeError('CUDA out of memory.\\nmore')")
    done = run(bundle, "--only", "64x256 W8A8 M=1")
    (row,) = results(bundle)["rows"]
    assert done.returncode == 0 and row["rival_failed"] == "CUDA out of memory."
    assert row["us"] > 0 and row["ratio"] is None


def test_a_graph_does_enough(made: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: first one graph of each copy of the weights, then a longer one, in turns."""
    monkeypatch.setattr(timing, "GRAPH_S", 1e9)
    monkeypatch.setattr(timing, "MOST_CALLS", 12)
    device = Gpu()
    described = json.loads((made / "bundle.json").read_text())["layers"][0]
    copies = copies_of(described["bytes"], described["bytes"], small=False)
    assert copies == 3
    with Memory(device) as memory:
        layer = Layer(device, made, described, copies, memory)
        found = Case(layer, described["cases"][0], memory)
        found.compute()
        found.clear()
        assert not found.error()[0] < np.inf  # what is cleared is NaN
        candidates = found.candidates(small=False)
        times = timing.measure(candidates, budget_s=0.0)
        assert found.error()[0] < described["cases"][0]["bound"]
        found.close()
    assert {name: c.calls for name, c in candidates.items()} == {"ours": 6, "product": 12}
    assert all(timed.us > 0 and timed.noise >= 0 for timed in times.values())


def test_how_many_copies_leave_the_cache() -> None:
    """Between two uses of one the others are read: twice the cache at least."""
    for nbytes in (10**6, 3 * 10**7, 10**9):
        copies = copies_of(nbytes, 5 * 10**7, small=False)
        assert copies >= 2 and (copies - 1) * nbytes >= 10**8
        assert copies == 2 or (copies - 2) * nbytes < 10**8
    assert copies_of(1, 10**9, small=True) == 2 and copies_of(1, 10**9, small=False) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("target", ["rtx-2080", "a100", "rtx-4090", "h200", "rtx-5090"])
def test_rates_are_of_instructions_that_there_are(target: str) -> None:
    """In machine code: the loops hold the ``mma`` they are named for, and call nothing."""
    gpu = find_profile(target).gpu
    try:
        code = disassemble(find_compiler(gpu).image(kinds_of_mma.rate_code(gpu.sm), gpu.sm))
    except BuildError as error:
        pytest.skip(str(error))
    kinds = [rate for rate in kinds_of_mma.RATES if gpu.sm in rate.sms]
    assert {f"apq_rate_{rate.kernel}" for rate in kinds} < set(code)
    for rate in kinds:
        kernel = code[f"apq_rate_{rate.kernel}"]
        shape = "{}{}{}".format(*rate.shape)
        count = len(re.findall(rf"[BHIQ]MMA\.{shape}\.", kernel.text))
        assert count % kinds_of_mma.CHAINS == 0 and count > 0, (rate, count)
        assert "CALL" not in kernel.text and kernel.local_bytes == 0, rate


# ---- what is wrong ----


def wrong_and_right(bundle: Path) -> tuple[list[str], list[str]]:
    rows = results(bundle)["rows"]
    named = [[f"{r['shape']} {r['scheme']} M={r['m']}" for r in rows if r["wrong"] is w]
             for w in (True, False)]  # fmt: skip
    assert all(r["us"] is r["ratio"] is None for r in rows if r["wrong"])
    return named[0], named[1]


def test_wrong_weights_are_found(bundle: Path, run: Run) -> None:
    """Scales of other rows: named, without times, and the other layers are measured."""
    path = bundle / "weights" / "k256_W4A8g32.npz"
    arrays = dict(np.load(path))
    arrays["weight_scales"] = arrays["weight_scales"][:, :, ::-1]
    np.savez(path, **arrays)
    done = run(bundle)
    assert done.returncode == 1
    bad, good = wrong_and_right(bundle)
    assert bad == [f"{shape} W4A8g32 M={m}" for shape in ("40x256", "64x256") for m in (1, 9)]
    assert len(good) == 4
    for words in bad:
        assert f"wrong: {words} ge" in done.stderr


def test_a_launch_of_too_few_blocks_is_found(bundle: Path, run: Run) -> None:
    """What nobody writes is NaN."""

    def shorten(document: dict[str, Any]) -> None:
        document["layers"][0]["cases"][0]["product"][0]["extents"][0] -= 1

    edited(bundle, shorten)
    done = run(bundle, "--only", "40x256")
    assert done.returncode == 1 and "error not finite" in done.stderr
    assert wrong_and_right(bundle)[0] == ["40x256 W4A8g32 M=1"]


def test_an_image_that_cannot_be_loaded_costs_only_its_layer(bundle: Path, run: Run) -> None:
    (bundle / "images" / "64x256_W8A8.sm_86").write_bytes(bytes(1000))
    done = run(bundle)
    assert done.returncode == 1
    failed = [row for row in results(bundle)["rows"] if row["failed"]]
    assert [(row["shape"], row["scheme"], row["m"]) for row in failed] == [
        ("64x256", "W8A8", 1), ("64x256", "W8A8", 9),
    ]  # fmt: skip
    assert all("CUDA_ERROR_INVALID_IMAGE" in row["failed"] for row in failed)


def test_after_a_fault_nothing_runs(bundle: Path, run: Run) -> None:
    """What was measured before is kept."""
    document = json.loads((bundle / "bundle.json").read_text())
    kernel = document["layers"][2]["cases"][0]["product"][0]["kernel"]
    first = document["layers"][0]["cases"][0]["product"][0]["kernel"]
    assert document["layers"][2]["shape"] == "64x256" and kernel == first

    def rename(document: dict[str, Any]) -> None:
        document["layers"] = document["layers"][1:]

    edited(bundle, rename)
    done = run(bundle, env={"CUSIM_FAULT": kernel})
    assert done.returncode == 1
    found = results(bundle)
    assert [(row["scheme"], bool(row["failed"])) for row in found["rows"]] == [
        ("W8A8", False), ("W8A8", False), ("W4A8g32", True), ("W4A8g32", True),
    ]  # fmt: skip
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in found["rows"][-1]["failed"]
    assert found["skipped"] == ["64x256 W8A8 M=1", "64x256 W8A8 M=9"]


def test_what_there_is_no_time_for_is_named(bundle: Path, run: Run) -> None:
    done = run(bundle, "--seconds", "0")
    assert done.returncode == 0, done.stderr
    found = results(bundle)
    assert found["rows"] == [] and len(found["skipped"]) == 8
    assert "skipped: 64x256 W8A8 M=9" in done.stdout


@pytest.mark.parametrize(
    "env, words, message",
    [
        (
            {"CUSIM_DEVICES": "0"},
            (),
            "the NVIDIA driver gives no GPU: cuInit: CUDA_ERROR_NO_DEVICE",
        ),
        ({"CUSIM_SM": "75"}, (), "has compute capability 7.5, and the bundle's images are for 8.6"),
        ({"CUSIM_SM": "90"}, (), "has compute capability 9.0"),
        ({"CUSIM_VERSION": "11080"}, (), "knows CUDA 11.8; the bundle wants release 525"),
        ({"CUSIM_MEMORY": "8192"}, (), "too little memory: 40x256 W4A8g32 wants"),
        ({}, ("--only", "nothing"), "--only 'nothing' fits no case"),
        ({}, ("--only", "("), "--only '('"),
        ({}, ("--out", "nowhere/results.json"), "there is no such folder"),
    ],
)
def test_what_does_not_fit_is_one_line(
    bundle: Path, run: Run, env: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    (bundle / "results.json").write_text("{}")
    done = run(bundle, *words, env=env)
    assert done.returncode == 2 and done.stdout == "", done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert results(bundle) == {}  # what stood there before


def test_no_driver(bundle: Path, run: Run) -> None:
    done = run(bundle, with_driver=False)
    if done.returncode != 2:
        pytest.skip("this machine has a driver of NVIDIA's")
    assert done.stderr.startswith("error: no NVIDIA driver on this machine (libcuda.so.1")


def test_another_gpu_of_the_same_major(bundle: Path, run: Run) -> None:
    done = run(bundle, "--only", "64x256 W8A8 M=1", env={"CUSIM_SM": "89"})
    assert done.returncode == 0, done.stderr


# ---- candidates ----


@pytest.fixture(scope="module")
def with_candidates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one case with candidates."""
    folder = tmp_path_factory.mktemp("searched") / "bundle"
    cases = [case(64, 1024, 1, "W8A8")]
    search = partial(searched, most=1)
    prepare(cases, folder, target="rtx-3090", images=Simulator(), candidates=search)
    return folder


def as_on_a_gpu(folder: Path, **changes: Any) -> None:
    """Times that a simulator has not, and changes of the one candidate."""
    found = results(folder)
    found["small"] = False
    (row,) = found["rows"]
    turns = [10 + i % 3 for i in range(40)]
    row["searched"]["default_us"] = turns
    (given,) = row["searched"]["candidates"]
    assert not given["failed"] and given["error"] <= row["bound"] and len(given["us"]) == 1
    given |= {"us": [t / 1.25 for t in turns], **changes}
    (folder / "results.json").write_text(json.dumps(found))


def test_a_faster_candidate_becomes_a_record(
    with_candidates: Path, run: Run, tmp_path: Path
) -> None:
    """And a layer of that shape is compiled by it; nothing that is not sure is believed."""
    folder = shutil.copytree(with_candidates, tmp_path / "bundle")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    with pytest.raises(BadInput, match="--small"):
        import_results(folder, tmp_path / "log.json")
    raw = (folder / "results.json").read_text()
    as_on_a_gpu(folder)
    (found,) = import_results(folder, tmp_path / "log.json")
    assert found.record is not None and not found.why
    (record,) = read_records(tmp_path / "log.json").records
    assert record.ratio == pytest.approx(1.25) and record.machine.startswith("simulated GPU 0")
    profile = find_profile("rtx-3090")
    kernels = by_name(linear_kernels(profile))
    (advice, *_) = Records([record]).advice(spec_of(record), kernels, profile)
    assert record.decisions and record.decisions.items() <= dict(advice.decisions).items()
    for changes, why in (
        ({"error": 1.0, "wrong": False}, "its error is 1.0"),
        ({"sha256": "0" * 64}, "the image that ran is not the bundle's"),
        ({"us": [1.0]}, "not those of the default's turns"),
        ({"failed": "CudaError: no"}, "CudaError: no"),
    ):
        (folder / "results.json").write_text(raw)
        as_on_a_gpu(folder, **changes)
        (found,) = import_results(folder, tmp_path / "none.json")
        assert found.record is None and why in found.why[0], found
    edited(folder, lambda document: document["layers"][0]["cases"][0].update(schedule="0" * 16))
    with pytest.raises(BadInput, match="not of the bundle"):
        import_results(folder, tmp_path / "none.json")
    (folder / "results.json").write_text(raw)
    as_on_a_gpu(folder)
    found_there = results(folder) | {
        "bundle": sha256((folder / "bundle.json").read_bytes()).hexdigest()
    }
    (folder / "results.json").write_text(json.dumps(found_there))
    (found,) = import_results(folder, tmp_path / "none.json")
    assert found.record is None and "of schedule 0000000000000000" in found.why[0]
    assert not read_records(tmp_path / "none.json").records


# ---- preparing ----


def test_an_output_is_replaced_by_force_alone(made: Path, tmp_path: Path) -> None:
    folder, cases = tmp_path / "bundle", [case(32, 64, 1, "W4A8g32")]
    options = {"target": "rtx-3090", "images": Simulator()}
    shutil.copytree(made, folder)
    with pytest.raises(OutputExists, match="--force"):
        prepare(cases, folder, **options)
    prepare(cases, folder, force=True, **options)
    assert [p.name for p in (folder / "weights").iterdir()] == ["k64_W4A8g32.npz"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(OutputExists, match="not a bundle"):
        prepare(cases, other, force=True, **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "other"]


def test_what_no_bundle_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"target": "rtx-3090", "images": Simulator()}
    with pytest.raises(BadInput, match=r"64x256 mixed24: .* not made of blocks of rows"):
        prepare([case(64, 256, 1, "mixed24")], tmp_path / "b", **options)
    with pytest.raises(BadTarget, match="cuda-auto is no GPU"):
        prepare([case(64, 256, 1, "W8A8")], tmp_path / "b", target="cuda-auto")
    monkeypatch.setattr(bundles, "MOST_BYTES", 1000)
    with pytest.raises(OutputFailed, match=r"would be \d+ bytes, more than 1000"):
        prepare([case(32, 64, 1, "W4A8g32")], tmp_path / "b", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """With NVIDIA's compiler: what machine code says is beside what will be measured."""
    try:
        find_compiler(find_profile("h200").gpu)
    except BuildError as error:
        pytest.skip(str(error))
    words = ["bench", "gpu", "--prepare", str(tmp_path / "b"), "--shape", "64x4096"]
    result = CliRunner().invoke(app, [*words, "--scheme", "W4A8g128", "--m", "1,32", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["target"] == "h200" and report["bytes"] < bundles.MOST_BYTES
    assert [c["kernel"].split("_")[0] for c in report["cases"]] == ["gemv", "gemm"]
    static = [c["static_us"] for c in report["cases"]]
    assert static == [None, None] or min(static) > 0
    again = CliRunner().invoke(app, [*words, "--json"])
    assert again.exit_code == 1 and "--force" in again.output
