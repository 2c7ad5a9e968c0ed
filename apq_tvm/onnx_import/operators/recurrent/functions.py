"""Activation functions of recurrent operators (ONNX operator specification, LSTM "activations").

Names are read in any case, as ONNX Runtime does; `alpha` and `beta` are handed out in order to the
functions that have them, and default to those of the ONNX operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from apq_tvm.onnx_import.operators.steps import Steps

# Defaults of alpha and beta, as many as the function has.
FUNCTIONS: dict[str, tuple[float, ...]] = {
    "affine": (1.0, 0.0),
    "elu": (1.0,),
    "hardsigmoid": (0.2, 0.5),
    "leakyrelu": (0.01,),
    "relu": (),
    "scaledtanh": (1.0, 1.0),
    "sigmoid": (),
    "softplus": (),
    "softsign": (),
    "tanh": (),
    "thresholdedrelu": (1.0,),
}
_SAME = {"relu": "Relu", "sigmoid": "Sigmoid", "softplus": "Softplus", "softsign": "Softsign"}
_WITH_ALPHA = {"elu": "Elu", "leakyrelu": "LeakyRelu", "thresholdedrelu": "ThresholdedRelu"}


@dataclass(frozen=True)
class Function:
    """An activation function and its parameters; `name` is in lower case."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0

    def apply(self, steps: Steps, x: str) -> str:
        """The function of a value."""
        if self.name == "tanh":
            return steps("Tanh", x)
        if self.name in _SAME:
            return steps(_SAME[self.name], x)
        if self.name in _WITH_ALPHA:
            return steps(_WITH_ALPHA[self.name], x, alpha=self.alpha)
        if self.name == "hardsigmoid":
            return steps("HardSigmoid", x, alpha=self.alpha, beta=self.beta)
        dtype = str(steps.graph.dtype(x))
        alpha, beta = (steps.number(number, dtype) for number in (self.alpha, self.beta))
        if self.name == "scaledtanh":
            return steps("Mul", steps("Tanh", steps("Mul", x, beta)), alpha)
        return steps("Add", steps("Mul", x, alpha), beta)  # affine


def read_functions(steps: Steps, directions: int, default: tuple[str, ...]) -> list[list[Function]]:
    """The functions of each direction.

    Parameters
    ----------
    steps : Steps
    directions : int
    default : tuple of str
        Of one direction.

    Raises
    ------
    UnsupportedModel
        An unknown function, or too few.
    """
    attrs = steps.node.attrs
    names = [str(name) for name in attrs.get("activations", default * directions)]
    if len(names) != len(default) * directions:
        raise steps.refuse(
            f"it has {len(names)} activations, but needs {len(default)} for each of {directions} "
            "directions"
        )
    unknown = [name for name in names if name.lower() not in FUNCTIONS]
    if unknown:
        raise steps.refuse(
            f"its activations {', '.join(map(repr, unknown))} are unknown; known are "
            f"{', '.join(sorted(FUNCTIONS))}"
        )
    alphas, betas = (iter(attrs.get(f"activation_{key}", ())) for key in ("alpha", "beta"))
    made = []
    for name in (name.lower() for name in names):
        defaults = FUNCTIONS[name]
        alpha = float(next(alphas, defaults[0])) if defaults else 0.0
        beta = float(next(betas, defaults[1])) if len(defaults) > 1 else 0.0
        made.append(Function(name, alpha, beta))
    size = len(default)
    return [made[i * size : (i + 1) * size] for i in range(directions)]


Apply = Callable[[Function, str], str]


def clipping(steps: Steps) -> Apply:
    """How functions are applied: to what the attribute ``clip`` leaves of their arguments."""
    threshold = float(steps.node.attrs.get("clip", 0.0))

    def apply(function: Function, x: str) -> str:
        if threshold > 0.0:
            dtype = str(steps.graph.dtype(x))
            x = steps("Clip", x, steps.number(-threshold, dtype), steps.number(threshold, dtype))
        return function.apply(steps, x)

    return apply
