"""Whole models for GPUs: the demo's under the simulated driver, and images for every target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import sentences

from apq_tvm import pipeline
from apq_tvm.codegen.cuda.compilers import find_compiler
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.codegen.cuda.split import DeviceCode
from apq_tvm.errors import BuildError, UnsupportedModel
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers.guided import Guidance, quantize_guided
from apq_tvm.schedules.devices import PROFILES, find_profile
from apq_tvm.types import QuantizedModel
from tests.onnx_models import build, rand, save, session_of
from tests.small_llama import inputs, small_llama

GPUS = [profile.name for profile in PROFILES if profile.gpu]
COSINE = 0.9999
POOLED, POOLED_COSINE = "461", 0.98
"""The demo's sentences as one vector each: to the float model's."""

LIBRARY_BYTES = 560_000
ALL_BYTES = 1_300_000
"""With images of seven compute capabilities."""


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    x, y = (v.ravel().astype(np.float64) for v in (a, b))
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


@pytest.mark.model
def test_demo_model_agrees_with_the_processors(
    demo_onnx: Path, gpu: None, program, tmp_path: Path
) -> None:
    """As the int8 module of x86-64, at three shapes, each with a graph of its own."""
    options = {"scheme": "W4A8g32", "search": False}
    pipeline.compile(demo_onnx, tmp_path / "cpu", target="x86-64", **options)
    pipeline.compile(demo_onnx, tmp_path / "gpu", target="rtx-3090", images=Simulator(), **options)
    mine, theirs = load_module(tmp_path / "gpu"), load_module(tmp_path / "cpu")
    rng = np.random.default_rng(0)
    for shape in ((1, 4), (2, 9), (1, 1)):
        mask = np.ones(shape, np.int64)
        mask[-1, shape[1] // 2 + 1 :] = 0
        feeds = {
            info.name: mask if "mask" in info.name else rng.integers(0, 30000, shape)
            for info in mine.inputs
        }
        wanted = theirs.run(feeds)
        for name, value in mine.run(feeds).items():
            assert cosine(value, wanted[name]) >= COSINE, (shape, name)
    _, words = sentences.load()
    feeds = {name: value[:8] for name, value in words.items()}
    (exact,) = session_of(demo_onnx).run([POOLED], feeds)
    found = mine.run(feeds)[POOLED]
    assert np.mean([cosine(a, b) for a, b in zip(found, exact, strict=True)]) >= POOLED_COSINE
    launches_are_few(program, tmp_path)


def launches_are_few(program, folder: Path) -> None:
    """Of the demo model's module ``gpu``: 8 a layer of three, and what is around them."""
    text = """
    import numpy as np
    import gpu
    gpu.run({i.name: np.ones((1, 4), np.int64) for i in gpu.inputs})
    """
    log = folder / "log"
    done = program(folder, text, {"CUSIM_LOG": str(log)})
    assert done.returncode == 0, done.stderr
    (captured,) = (line for line in log.read_text().splitlines() if line.startswith("captured"))
    assert int(captured.split()[1]) <= 3 * 8 + 15, captured


NEWEST = "rtx-5090"


@pytest.fixture(scope="module")
def quantized_demo(demo_onnx: Path) -> QuantizedModel:
    return quantize_guided(import_onnx(demo_onnx), "W4A8g32", {}, Guidance(), search=False)


@pytest.mark.model
@pytest.mark.parametrize(
    "target",
    [
        NEWEST,
        *(pytest.param(g, marks=pytest.mark.all_cases) for g in GPUS if g != NEWEST),
    ],
)
def test_demo_model_compiles_small(
    quantized_demo: QuantizedModel, target: str, tmp_path: Path
) -> None:
    """Images by NVRTC or nvcc, where this machine has the one that the target wants."""
    profile = find_profile(target)
    try:
        images = find_compiler(profile.gpu)
        plan = pipeline.plan_quantized(quantized_demo, profile)
        module = pipeline.build(plan, tmp_path / "demo", images=images)
    except BuildError as error:
        if "pip install" in str(error) or "apt-get install" in str(error):
            pytest.skip(str(error))
        raise
    library = (module.path / "libdemo.so").read_bytes()
    assert len(library) < (ALL_BYTES if target == "cuda-auto" else LIBRARY_BYTES)
    assert b"libcuda.so.1" in library and module.manifest["library"]["gpu"]["sm"] in (
        75, 80, 86, 87, 89, 90, 110, 120,
    )  # fmt: skip


def test_what_data_decide_is_refused_by_name(tmp_path: Path) -> None:
    nodes = [("NonZero", "x", "y")]
    path = save(build(nodes, {"x": ("float32", ["n", 4])}, "y"), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"rtx-3090: the model has sizes that its data"):
        pipeline.compile(path, tmp_path / "m", target="rtx-3090", images=Simulator())


def test_a_decoder_keeps_its_cache(gpu: None, tmp_path: Path) -> None:
    """Token by token as at once, as the processor's module, and without a race."""
    path = small_llama(tmp_path / "llama.onnx")
    options = {"scheme": "W4A8g32", "search": False}
    pipeline.compile(path, tmp_path / "cpu", target="x86-64", **options)
    images = Simulator(checked=True)
    pipeline.compile(path, tmp_path / "gpu", target="rtx-3090", images=images, **options)
    module = load_module(tmp_path / "gpu")
    feeds = inputs(5)
    whole, theirs = module.run(feeds), load_module(tmp_path / "cpu").run(feeds)
    for name, value in whole.items():
        assert cosine(value, theirs[name]) >= COSINE, name
    past = {name: value for name, value in feeds.items() if name != "input_ids"}
    for at in range(5):
        step = module.run({"input_ids": feeds["input_ids"][:, at : at + 1], **past})
        np.testing.assert_allclose(step["logits"][0, 0], whole["logits"][0, at], atol=1e-3)
        past = {name: step[name.replace("past_key_values", "present")] for name in past}


def test_one_module_for_every_gpu(program, tmp_path: Path) -> None:
    """By the image of its capability or an earlier one of the same major, or by the text."""
    path = save(
        build([("MatMul", "x w", "y")], {"x": ("float32", ["m", 64])}, "y", {"w": rand(64, 48)}),
        tmp_path,
    )
    pipeline.compile(
        path, tmp_path / "auto", target="cuda-auto", scheme="W4A8g32", images=Simulator()
    )
    text = """
    import numpy as np
    import auto
    print(auto.run(x=np.ones((3, 64), np.float32))["y"].sum())
    """
    said = set()
    for sm in (75, 80, 86, 87, 89, 90, 100, 110, 120):
        done = program(tmp_path, text, {"CUSIM_SM": str(sm)})
        assert done.returncode == 0, done.stderr
        said.add(done.stdout)
    assert len(said) == 1
    done = program(tmp_path, text, {"CUSIM_SM": "70"})
    assert "WrongMachine" in done.stderr and "cuda-auto" in done.stderr


@dataclass(frozen=True)
class Unreadable(Simulator):
    """Its text is none that a driver takes."""

    def ptx(self, code: DeviceCode, sm: int) -> bytes:
        return b"// none"


def test_images_are_not_shared_with_jetsons(program, tmp_path: Path) -> None:
    """Orin is 8.7, and takes the text of a module for 8.6, not its image; 8.9 takes the image."""
    path = save(build([("Relu", "x", "y")], {"x": ("float32", ["m", 64])}, "y"), tmp_path)
    pipeline.compile(path, tmp_path / "relu", target="rtx-3090", images=Unreadable())
    assert program(tmp_path, "import relu", {"CUSIM_SM": "89"}).returncode == 0
    done = program(tmp_path, "import relu", {"CUSIM_SM": "87"})
    assert done.returncode == 1 and "cuModuleLoadData" in done.stderr, done.stderr
