"""LayerNormalization (ONNX opset 17) and its RMS variant over trailing axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx

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
    rows, cols = extents[:first], extents[first:]
    one = tuple(tirx.const(1, "int64") for _ in cols)
    x = te.placeholder(extents, "float32", "x")
    scale = te.placeholder(cols, "float32", "scale")
    args = [x, scale]
    if bias:
        args.append(te.placeholder(cols, "float32", "bias"))
    count: Any = tirx.const(1, "int64")
    for c in cols:
        count = count * c
    share = tirx.const(1.0, "float32") / count.astype("float32")

    def reduce_axes(name: str) -> list[Any]:
        return [te.reduce_axis((0, c), f"{name}{i}") for i, c in enumerate(cols)]

    def row(index: Sequence[Any]) -> Sequence[Any]:
        return tuple(index[:first]) + tuple(tirx.const(0, "int64") for _ in cols)

    outputs: list[Any] = []
    mean: Any = None
    if not rms:
        j = reduce_axes("j")
        total = te.compute(rows + one, lambda *r: te.sum(x(*r[:first], *j), axis=j), "total")
        mean = te.compute(rows + one, lambda *r: total(*r) * share, "mean")
        outputs.append(mean)

    def centred(*index: Any) -> Any:
        return x(*index) if mean is None else x(*index) - mean(*row(index))

    k = reduce_axes("k")
    squares = te.compute(
        rows + one,
        lambda *r: te.sum(centred(*r[:first], *k) * centred(*r[:first], *k), axis=k),
        "squares",
    )
    eps = tirx.const(epsilon, "float32")
    inverse = te.compute(
        rows + one,
        lambda *r: tirx.const(1.0, "float32") / tirx.sqrt(squares(*r) * share + eps),
        "inverse",
    )
    outputs.append(inverse)

    def result(*index: Any) -> Any:
        value = centred(*index) * inverse(*row(index)) * scale(*index[first:])
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
        }
    )
