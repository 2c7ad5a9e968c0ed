"""LayerNormalization (ONNX opset 17) and its RMS variant over trailing axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.graph.shapes import Dim, Symbols


def layernorm(
    shape: Sequence[Dim],
    axis: int = -1,
    epsilon: float = 1e-5,
    *,
    bias: bool = True,
    rms: bool = False,
    statistics: bool = False,
) -> Any:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the axes from `axis` on.

    The variance is the mean of squared differences, in a pass of its own: E[x²] - E[x]² cancels for
    rows far from zero.

    Parameters
    ----------
    shape : sequence of int or str
        Of ``x`` and ``y``; strings are dynamic dimensions.
    axis : int
        First normalised axis. ``scale`` and ``bias`` have the shape of the axes from here on.
    epsilon : float
        Added to the variance.
    bias : bool
        False: there is no bias argument.
    rms : bool
        True: the mean is not subtracted (RMSNorm, arXiv:1910.07467); there is no mean output.
    statistics : bool
        True: ``mean`` and ``inverse`` (1 / standard deviation) are outputs too, of the shape of
        ``x`` with normalised axes 1, as ONNX's outputs 2 and 3.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, scale, [bias], y, [mean, inverse])``, all float32, unscheduled, attr ``apq.op`` =
        "layernorm".
    """
    symbols = Symbols()
    extents = symbols.shape(shape)
    first = axis % len(shape)
    cols = extents[first:]
    x = te.placeholder(extents, "float32", "x")
    scale = te.placeholder(cols, "float32", "scale")
    args = [x, scale, *([te.placeholder(cols, "float32", "bias")] if bias else [])]
    centred, inverse, outputs = _statistics(x, first, epsilon, rms)

    def result(*index: Any) -> Any:
        value = centred(*index) * inverse(*_row(index, first)) * scale(*index[first:])
        return value + args[2](*index[first:]) if bias else value

    y = te.compute(extents, result, "y")
    func = te.create_prim_func([*args, y, *(outputs if statistics else [])])
    steps = ["total", "mean", "squares", "inverse"][2 if rms else 0 :]
    return func.with_attrs(
        {
            "apq.op": "layernorm",
            "op_pattern": 8,
            "apq.rows": first,
            "apq.steps": steps,
            "apq.statistics": statistics,
            "apq.epsilon": epsilon,
        }
    )


def _row(index: Sequence[Any], first: int) -> Sequence[Any]:
    """Where the statistics of an element's row are."""
    return (*index[:first], *(tirx.const(0, "int64") for _ in index[first:]))


def of_last_axis(layernorm: Any) -> tuple[float, bool, bool]:
    """Epsilon of a `layernorm` of rows, whether it is centred, and whether it has a bias.

    Raises
    ------
    NotApplicable
        More than the last axis is normalised, or statistics are outputs.
    """
    attrs, (x, *rest) = layernorm.attrs, layernorm.params
    if int(attrs["apq.rows"]) != len(x.shape) - 1 or bool(attrs["apq.statistics"]):
        raise NotApplicable("a normalization of several axes, or with statistics, is alone")
    return float(attrs["apq.epsilon"]), "mean" in map(str, attrs["apq.steps"]), len(rest) == 3


def _statistics(
    x: Any, first: int, epsilon: float, rms: bool
) -> tuple[Callable[..., Any], Any, list[Any]]:
    """x less its mean by index, 1 / standard deviation, and the statistics that are outputs."""
    rows, cols = tuple(x.shape[:first]), tuple(x.shape[first:])
    of_rows = rows + tuple(tirx.const(1, "int64") for _ in cols)
    count: Any = tirx.const(1, "int64")
    for c in cols:
        count = count * c
    share = tirx.const(1.0, "float32") / count.astype("float32")

    def summed(name: str, along: str, term: Callable[..., Any]) -> Any:
        axes = [te.reduce_axis((0, c), f"{along}{i}") for i, c in enumerate(cols)]
        return te.compute(of_rows, lambda *r: te.sum(term(*r[:first], *axes), axis=axes), name)

    mean: Any = None
    if not rms:
        total = summed("total", "j", x)
        mean = te.compute(of_rows, lambda *r: total(*r) * share, "mean")

    def centred(*index: Any) -> Any:
        return x(*index) if mean is None else x(*index) - mean(*_row(index, first))

    squares = summed("squares", "k", lambda *at: centred(*at) * centred(*at))
    eps, one = tirx.const(epsilon, "float32"), tirx.const(1.0, "float32")
    inverse = te.compute(of_rows, lambda *r: one / tirx.sqrt(squares(*r) * share + eps), "inverse")
    return centred, inverse, [inverse] if mean is None else [mean, inverse]
