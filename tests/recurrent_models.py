"""LSTM, GRU and RNN in all their forms, joined into one model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from tests.onnx_models import build

INPUTS, HIDDEN = 32, 20
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
RNG = np.random.default_rng(0)

# name: (operator, inputs beside x w r, attributes); the words name what ONNX calls them.
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lstm": ("LSTM", "", {}),
    "lstm_bias_states": ("LSTM", "b h0 c0", {"direction": "reverse"}),
    "lstm_two": ("LSTM", "b lens h0 c0", {"direction": "bidirectional"}),
    "lstm_lens_back": ("LSTM", "b lens", {"direction": "reverse"}),
    "lstm_peepholes": ("LSTM", "b h0 c0 p", {"direction": "bidirectional"}),
    "lstm_clip": ("LSTM", "b p", {"clip": 0.4}),
    "lstm_coupled": ("LSTM", "b", {"input_forget": 1}),
    "lstm_functions": (
        "LSTM",
        "b",
        {
            "direction": "bidirectional",
            "activations": ["HardSigmoid", "Softsign", "ScaledTanh", "Sigmoid", "Elu", "LeakyRelu"],
            "activation_alpha": [0.3, 1.5, 0.7, 0.02],
            "activation_beta": [0.4, 0.8],
        },
    ),
    "gru": ("GRU", "b", {}),
    "gru_early_two": ("GRU", "b lens h0", {"direction": "bidirectional"}),
    "gru_late": ("GRU", "b h0", {"linear_before_reset": 1, "direction": "bidirectional"}),
    "gru_late_plain": ("GRU", "lens", {"linear_before_reset": 1, "direction": "reverse"}),
    "gru_functions": (
        "GRU",
        "b",
        {
            "activations": ["Affine", "ThresholdedRelu"],
            "activation_alpha": [0.2, 0.1],
            "activation_beta": [0.5],
            "clip": 3.0,
        },
    ),
    "rnn": ("RNN", "b", {}),
    "rnn_two": (
        "RNN",
        "b lens h0",
        {"direction": "bidirectional", "activations": ["Relu", "Softplus"]},
    ),
}
ORDER = {"LSTM": "b lens h0 c0 p".split(), "GRU": "b lens h0".split(), "RNN": "b lens h0".split()}
X: dict[str, Any] = {
    "x": ("float32", ["t", "n", INPUTS]),
    "lens": ("int32", ["n"]),
    **{f"{s}0_{d}": ("float32", [d, "n", HIDDEN]) for s in "hc" for d in (1, 2)},
}
SIZES = ((1, 1), (7, 3), (16, 1))


def weight(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) * 0.3).astype(np.float32)


def joined(names: list[str]) -> onnx.ModelProto:
    """One model of some variants; outputs are ``name.y``, ``name.h`` and ``name.c``."""
    nodes, outputs, weights = [], [], {}
    for name in names:
        op, extra, attrs = VARIANTS[name]
        gates, count = GATES[op], 2 if attrs.get("direction") == "bidirectional" else 1
        weights |= {
            f"{name}.w": weight(count, gates * HIDDEN, INPUTS),
            f"{name}.r": weight(count, gates * HIDDEN, HIDDEN),
            f"{name}.b": weight(count, 2 * gates * HIDDEN),
            f"{name}.p": weight(count, 3 * HIDDEN),
        }
        own = {"b": f"{name}.b", "p": f"{name}.p", "lens": "lens"}
        own |= {f"{state}0": f"{state}0_{count}" for state in "hc"}
        given = [own[word] if word in extra.split() else "_" for word in ORDER[op]]
        made = [f"{name}.y", f"{name}.h", *([f"{name}.c"] if op == "LSTM" else [])]
        reads = " ".join(["x", f"{name}.w", f"{name}.r", *given])
        nodes.append((op, reads, " ".join(made), {"hidden_size": HIDDEN, **attrs}))
        outputs += made
    return build(nodes, X, " ".join(outputs), weights, opset=17)


def feeds(steps: int, batch: int) -> dict[str, Any]:
    made = {"x": weight(steps, batch, INPUTS) * 3}
    made["lens"] = RNG.integers(1, steps + 1, batch).astype(np.int32)
    made |= {f"{s}0_{d}": weight(d, batch, HIDDEN) for s in "hc" for d in (1, 2)}
    return made
