"""Real encoders in every family of formats: modules against the simulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import demo_model
import minilm_l6
import numpy as np
import pytest

import apq_tvm
from apq_tvm.evaluation.simulate import Simulation
from apq_tvm.formats import FAMILIES, parse_scheme
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers.guided import Guidance, quantize_guided
from tests.simulated import relative

GROUPED, WHOLE = 0.005, 0.025
"""Most that outputs may differ: of activations in groups, and of ones that a token shares, where
a code that turns the other way at half a step is worth more."""

SCHEMES = ("W4A8g32", "W8A8", *(f.examples[0] for f in FAMILIES if f.name != "int"))

pytestmark = [pytest.mark.all_cases, pytest.mark.model]


def _large(folder: Path) -> Path:
    return minilm_l6.write(minilm_l6.find(), folder / "l6.onnx")


MODELS: dict[str, Callable[[Path], Path]] = {"l3": lambda _: demo_model.find(), "l6": _large}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return MODELS[request.param](tmp_path_factory.mktemp("real"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_module_computes_what_is_simulated(scheme: str, model: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(1000, 30000, (2, 24))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    feeds["attention_mask"][1, 9:] = 0
    quantized = quantize_guided(import_onnx(model), scheme, {}, Guidance(), search=False)
    apq_tvm.compile(model, tmp_path / "m", scheme=scheme, search=False)
    parsed = parse_scheme(scheme)
    assert parsed is not None
    most = WHOLE if parsed.act_group == -1 else GROUPED
    simulation = Simulation(quantized)
    wanted, found = simulation.run(feeds), load_module(tmp_path / "m").run(feeds)
    for name, value in wanted.items():
        print("FIG", model.name, scheme, name, relative(found[name], value))
        assert relative(found[name], value) < most
        assert not relative(np.zeros_like(value), value) < most
