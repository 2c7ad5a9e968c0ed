"""Real encoders in every family of formats: modules against the simulation.

A code of activations that turns the other way at half a step moves the next layer's, so that over
six layers 2e-7 of noise in each product becomes 2 to 7 % of the result, in the simulation alone.
Every case therefore measures that too: how far noise as large as the kernels' own bounds
(`tests.simulated`) takes the simulation from itself. A module may be twice as far, two such noises,
where that is more than the plain bounds. What is wrong in one layer of a deep model by less than
that is for test_schemes and test_families to see, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo_model
import minilm_l6
import numpy as np
import pytest
import torch

from apq_tvm import pipeline
from apq_tvm.evaluation.simulate import Simulation
from apq_tvm.formats import FAMILIES, parse_scheme
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers.guided import Guidance, quantize_guided
from apq_tvm.schedules.devices import find_profile
from apq_tvm.types import ImportedModel, QuantizedModel
from tests.simulated import limit, relative

GROUPED, WHOLE = 0.005, 0.025
"""Most that outputs may differ: of activations in groups, and of ones that a token shares, where
a code that turns the other way at half a step is worth more."""

SCHEMES = ("W4A8g32", "W8A8", *(f.examples[0] for f in FAMILIES if f.name != "int"))

pytestmark = [pytest.mark.all_cases, pytest.mark.model]


def _large(folder: Path) -> Path:
    return minilm_l6.write(minilm_l6.find(), folder / "l6.onnx")


MODELS: dict[str, Callable[[Path], Path]] = {"l3": lambda _: demo_model.find(), "l6": _large}


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ImportedModel:
    try:
        return import_onnx(MODELS[request.param](tmp_path_factory.mktemp("real")))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_module_computes_what_is_simulated(
    scheme: str, model: ImportedModel, tmp_path: Path
) -> None:
    ids = np.random.default_rng(0).integers(1000, 30000, (2, 24))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    feeds["attention_mask"][1, 9:] = 0
    quantized = quantize_guided(model, scheme, {}, Guidance(), search=False)
    pipeline.build(pipeline.plan_quantized(quantized, find_profile("host")), tmp_path / "m")
    parsed = parse_scheme(scheme)
    assert parsed is not None
    plain = WHOLE if parsed.act_group == -1 else GROUPED
    wanted, found = Simulation(quantized).run(feeds), load_module(tmp_path / "m").run(feeds)
    noisy = Noisy(quantized, limit(parsed)).run(feeds)
    for name, value in wanted.items():
        if value.dtype.kind != "f":
            np.testing.assert_array_equal(found[name], value)
            continue
        most = max(plain, 2 * relative(noisy[name], value))
        assert relative(found[name], value) < most, name
        assert most < 0.7, "zeros, or another model's result, would pass"


class Noisy(Simulation):
    """With noise in every quantized layer's product, relative to its root mean square."""

    def __init__(self, quantized: QuantizedModel, level: float) -> None:
        super().__init__(quantized)
        self.level, self.generator = level, torch.Generator().manual_seed(0)

    def _product(self, node: Any, x: Any, w: Any, bias: Any) -> Any:
        y = super()._product(node, x, w, bias)
        if node.name not in self.schemes:
            return y
        noise = torch.randn(y.shape, generator=self.generator)
        return y + self.level * y.square().mean().sqrt() * noise
