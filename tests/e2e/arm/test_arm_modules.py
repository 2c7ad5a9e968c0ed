"""Modules compiled here for 64-bit Arm: run under qemu, refused where they cannot run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import apq_tvm
from apq_tvm.bench.emulator import COMPILERS
from apq_tvm.bench.module_program import ModuleProgram
from apq_tvm.errors import BadInput
from apq_tvm.explain import explain, explanation_lines
from apq_tvm.inspect import devices, inspect
from apq_tvm.module import load_module
from apq_tvm.types import Array
from tests.e2e.arm.arm_module import WIDTH, WORDS, cosine, needs_qemu
from tests.onnx_models import build, rand, run_onnx, save

LIBRARY_BYTES = 600_000
# cosine to float32 of 4-bit weights in groups of 32; of Arm's results to this machine's, which
# differ where a rounding of activations tips over.
TO_FLOAT, TO_HOST = 0.97, 0.9999

# `auto` has the kernels of the others; graviton3's families run in test_arm_families.
TARGETS = (("graviton2", "neoverse-n1"), ("cortex-a53", "cortex-a53"))

pytestmark = needs_qemu


@pytest.fixture(scope="module")
def ids() -> Array:
    return np.random.default_rng(0).integers(0, WORDS, (2, 9))


@pytest.fixture(scope="module")
def references(words_onnx: Path, words: Callable[[str], Path], ids: Array) -> tuple[Array, Array]:
    """What ONNX Runtime gives in float32, and a module of this machine."""
    mine: Array = load_module(words("host")).run(ids=ids)["y"]
    return run_onnx(words_onnx, {"ids": ids})["y"], mine


def check(y: Array, references: tuple[Array, Array]) -> None:
    wanted, mine = references
    assert y.shape == wanted.shape
    assert cosine(y, wanted) > TO_FLOAT and cosine(y, mine) > TO_HOST


@pytest.mark.all_cases
@pytest.mark.parametrize("target,cpu", TARGETS)
def test_results_under_qemu(
    target: str, cpu: str, words: Callable[[str], Path], ids: Array,
    references: tuple[Array, Array], tmp_path: Path,
) -> None:  # fmt: skip
    module = ModuleProgram(words(target), tmp_path)
    assert module.manifest["library"]["machine"] == "aarch64"
    check(module.run({"ids": ids}, cpu)["y"], references)
    assert module.target == target


@pytest.fixture(scope="module")
def auto(words: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> ModuleProgram:
    return ModuleProgram(words("arm-auto"), tmp_path_factory.mktemp("auto"))


@pytest.mark.parametrize(
    "cpu,target",
    (
        ("max", "armv8.6-i8mm"),
        ("neoverse-n1", "armv8.2-dotprod"),
        pytest.param("cortex-a76", "armv8.2-dotprod", marks=pytest.mark.all_cases),
        pytest.param("cortex-a72", "armv8-a", marks=pytest.mark.all_cases),
        ("cortex-a53", "armv8-a"),
    ),
)
def test_library_chooses_by_the_machine(
    cpu: str, target: str, auto: ModuleProgram, ids: Array, references: tuple[Array, Array]
) -> None:
    check(auto.run({"ids": ids}, cpu)["y"], references)
    assert auto.target == target


def test_variants_share_their_weights(auto: ModuleProgram) -> None:
    assert auto.manifest["weights"]["bytes"] < 1.1 * _weight_bytes(auto)
    layouts = [[layer["layout"] for layer in layers] for _, layers in devices(auto.manifest)]
    assert layouts[0] == layouts[1] == layouts[2]


def _weight_bytes(module: ModuleProgram) -> int:
    """Of the layers, with room for the padding of rows and the norm's vectors."""
    return sum(layer["bytes"] for layer in module.manifest["layers"]) + 8 * WIDTH


def test_every_variant_is_shown(auto: ModuleProgram) -> None:
    report = inspect(auto.module)
    assert report["target"] == "arm-auto"
    names = ["armv8.6-i8mm", "armv8.2-dotprod", "armv8-a"]
    assert [target for target, _ in devices(report)] == names
    assert list(report["library"]["devices"]) == names
    text = "\n".join(explanation_lines(explain(auto.module, "m$")))
    assert all(f"target {name}: " in text for name in names)
    assert text.count("W4A8g32 in layout") == 3


@pytest.mark.parametrize(
    "target,cpu,feature",
    (
        ("graviton3", "neoverse-n1", "(bf16|i8mm|sve|fcma|asimdfhm)"),
        pytest.param("armv8.6-i8mm", "neoverse-n1", "(i8mm|asimdfhm)", marks=pytest.mark.all_cases),
        pytest.param(
            "armv8.2-dotprod", "cortex-a72", "(asimddp|asimdhp)", marks=pytest.mark.all_cases
        ),
        ("graviton2", "cortex-a53", "(asimddp|asimdhp|asimdrdm|atomics)"),
    ),
)
def test_missing_feature_is_refused_at_load(
    target: str, cpu: str, feature: str, tmp_path: Path
) -> None:
    """No SIGILL: the library says which feature the machine lacks."""
    model = build([("MatMul", "x w", "y")], {"x": ("float32", ["m", 32])}, "y", {"w": rand(32, 16)})
    apq_tvm.compile(save(model, tmp_path), tmp_path / "small", target=target, search=False)
    module = ModuleProgram(tmp_path / "small", tmp_path)
    message = f"-3 libsmall needs the CPU feature {feature}, which this machine lacks: .*{target}"
    with pytest.raises(BadInput, match=message):
        module.run({"x": np.ones((1, 32), np.float32)}, cpu)
    assert module.run({"x": np.ones((1, 32), np.float32)}, "max")["y"].shape == (1, 16)


def test_python_says_which_machine_a_library_is_for(auto: ModuleProgram) -> None:
    message = r"WrongMachine: auto was compiled for linux on aarch64, this is linux on \w+"
    with pytest.raises(BadInput, match=message):
        load_module(auto.module)


def test_android_by_its_triple(tmp_path: Path) -> None:
    """A module for bionic, by a clang of the NDK; here one that only pretends and calls gcc."""
    fake = tmp_path / "bin" / "clang"
    fake.parent.mkdir()
    fake.write_text(
        f"""#!/bin/sh
echo "$@" >> {tmp_path}/log
case " $* " in
  *" --version "*) echo "Android clang version 18.0.1"; exit;;
  *" -dumpmachine "*) echo aarch64-unknown-linux-android24; exit;;
esac
for word; do shift; case $word in --target=*) ;; *) set -- "$@" "$word";; esac; done
exec {COMPILERS["aarch64"]} -D__BIONIC__ "$@"
"""
    )
    fake.chmod(0o755)
    model = build([("MatMul", "x w", "y")], {"x": ("float32", ["m", 32])}, "y", {"w": rand(32, 16)})
    apq_tvm.compile(
        save(model, tmp_path), tmp_path / "phone", target="cortex-x2", search=False,
        triple="aarch64-linux-android24", cc=str(fake),
    )  # fmt: skip
    module = ModuleProgram(tmp_path / "phone", tmp_path)
    assert module.manifest["library"]["system"] == "android"
    assert module.manifest["tvm_target"]["mtriple"] == "aarch64-linux-android24"
    assert "-lpthread" not in (tmp_path / "phone" / "phone.pc").read_text()
    calls = (tmp_path / "log").read_text().splitlines()
    compiles = [call for call in calls if " -c " in call or "-shared" in call]
    assert compiles and all("--target=aarch64-linux-android24" in call for call in compiles)
    assert not any("-lpthread" in call for call in calls)
    assert module.run({"x": np.ones((1, 32), np.float32)})["y"].shape == (1, 16)
    with pytest.raises(BadInput, match="compiled for android on aarch64, this is linux"):
        load_module(module.module)


@pytest.mark.model
@pytest.mark.all_cases
def test_demo_model(demo_onnx: Path, tmp_path: Path) -> None:
    """A real sentence encoder; its library is small, even with code for three kinds of machines."""
    import sentences

    inputs = {name: array[:4] for name, array in sentences.load()[1].items()}
    wanted = run_onnx(demo_onnx, inputs)
    apq_tvm.compile(demo_onnx, tmp_path / "minilm", target="arm-auto", search=False)
    module = ModuleProgram(tmp_path / "minilm", tmp_path)
    for cpu in ("max", "neoverse-n1", "cortex-a72"):
        results = module.run(inputs, cpu)
        for name in ("onnx::Shape_422", "461"):
            assert cosine(results[name], wanted[name]) > TO_FLOAT, (cpu, name)
    assert (module.module / "libminilm.so").stat().st_size <= LIBRARY_BYTES
