"""What each operator of the normalised graph means in torch; its numpy twin is a test's oracle.

What transformers need is here, the rest in `images`, `more` and `windows`; operators in none of
them are refused by name. Importing this module imports torch: do so inside a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from apq_tvm.errors import BadInput
from apq_tvm.extras import require
from apq_tvm.formats.caches import group_size
from apq_tvm.onnx_import.symbolic.dims import evaluate

require("torch")
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from apq_tvm.quantizers.torch.images import IMAGE_OPS  # noqa: E402
from apq_tvm.quantizers.torch.more import MORE_OPS, plain  # noqa: E402
from apq_tvm.quantizers.torch.windows import WINDOW_OPS, depthwise  # noqa: E402

__all__ = ["ACTIVATIONS", "OPS", "F", "Tensor", "dtype_named", "resolve", "torch"]

Tensor = Any
Attrs = Mapping[str, Any]

# ONNX's TensorProto.DataType.
DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sigmoid_ratio": torch.sigmoid,
    "tanh_ratio": torch.tanh,
    "silu": F.silu,
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
}


def dtype_named(name: str) -> Any:
    """torch dtype of a numpy name."""
    return getattr(torch, name)


def _ints(tensor: Tensor) -> list[int]:
    return [int(v) for v in tensor.reshape(-1).tolist()]


def _axes(attrs: Attrs, given: tuple[Tensor, ...], at: int = 0) -> list[int] | None:
    """Axes from the input at `at` (newer opsets) or the attribute; None where neither is there."""
    if len(given) > at and given[at] is not None:
        return _ints(given[at])
    axes = attrs.get("axes")
    return None if axes is None else [int(a) for a in axes]


def _softmax_scaled(attrs: Attrs, x: Tensor, mask: Tensor = None) -> Tensor:
    scores = x * attrs["scale"]
    scores = scores if mask is None else scores + mask
    result = torch.softmax(scores, dim=-1)
    if attrs["zero_masked"]:
        result = torch.where((scores == -math.inf).all(-1, keepdim=True), 0.0, result)
    return result


def _matmul(attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    return (a.permute(attrs["perm_a"]) @ b.permute(attrs["perm_b"])).permute(attrs["perm_out"])


def _embedding(attrs: Attrs, table: Tensor, ids: Tensor) -> Tensor:
    rows = torch.where(ids < 0, ids + len(table), ids)
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= len(table)):
        wrong = ids[(rows < 0) | (rows >= len(table))].flatten()[0]
        text = f"id {int(wrong)} is outside of a table of {len(table)} rows"
        raise BadInput(f"the model refuses the inputs: {text}")
    return F.embedding(rows, table)


def _slice_apq(attrs: Attrs, x: Tensor) -> Tensor:
    for axis, start, step in zip(attrs["axes"], attrs["starts"], attrs["steps"], strict=True):
        x = x.index_select(axis, start + step * torch.arange(attrs["shape"][axis]))
    return x


def _slice(attrs: Attrs, x: Tensor, starts: Tensor, ends: Tensor, *rest: Tensor) -> Tensor:
    axes = _axes({}, rest) or list(range(starts.numel()))
    steps = _ints(rest[1]) if len(rest) > 1 and rest[1] is not None else [1] * len(axes)
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, _ints(starts), _ints(ends), steps, strict=True):
        if step < 1:
            raise BadInput(f"Slice with step {step} is not run in calibration")
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def _reshape(attrs: Attrs, x: Tensor, shape: Tensor) -> Tensor:
    sizes = _ints(shape)
    if not attrs.get("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _unsqueeze(attrs: Attrs, x: Tensor, *axes: Tensor) -> Tensor:
    wanted = _axes(attrs, axes) or []
    rank = x.ndim + len(wanted)
    for axis in sorted(a % rank for a in wanted):
        x = x.unsqueeze(axis)
    return x


def _squeeze(attrs: Attrs, x: Tensor, *axes: Tensor) -> Tensor:
    wanted = _axes(attrs, axes)
    return x.squeeze() if wanted is None else x.squeeze([a % x.ndim for a in wanted])


def _gather(attrs: Attrs, x: Tensor, index: Tensor) -> Tensor:
    axis = attrs.get("axis", 0) % x.ndim
    index = torch.where(index < 0, index + x.shape[axis], index)
    picked = x.index_select(axis, index.reshape(-1))
    return picked.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _split(attrs: Attrs, x: Tensor, *sizes: Tensor) -> tuple[Tensor, ...]:
    axis = attrs.get("axis", 0)
    wanted = _ints(sizes[0]) if sizes and sizes[0] is not None else attrs.get("split")
    if wanted is None:
        count = attrs["outputs"]
        wanted = -(-x.shape[axis] // count)
    return tuple(torch.split(x, wanted, axis))


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(attrs: Attrs, x: Tensor, *axes: Tensor) -> Tensor:
        wanted = _axes(attrs, axes)
        if not wanted and attrs.get("noop_with_empty_axes", 0):
            return x
        return function(x, wanted or list(range(x.ndim)), bool(attrs.get("keepdims", 1)))

    return run


def _softmax(attrs: Attrs, x: Tensor) -> Tensor:
    return torch.softmax(x, attrs.get("axis", -1))


def _layer_norm(attrs: Attrs, x: Tensor, gamma: Tensor, beta: Tensor = None) -> Tensor:
    axis = attrs.get("axis", -1) % x.ndim
    return F.layer_norm(x, x.shape[axis:], gamma, beta, attrs.get("epsilon", 1e-5))


def _rms_norm(attrs: Attrs, x: Tensor, gamma: Tensor) -> Tensor:
    axis = attrs.get("axis", -1) % x.ndim
    square = x.square().mean(list(range(axis, x.ndim)), keepdim=True)
    return x * torch.rsqrt(square + attrs.get("epsilon", 1e-5)) * gamma


def _clip(attrs: Attrs, x: Tensor, low: Tensor = None, high: Tensor = None) -> Tensor:
    return x if low is None and high is None else torch.clamp(x, low, high)


def _divide(attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _expand(attrs: Attrs, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, _ints(shape)))


def _gemm(attrs: Attrs, a: Tensor, b: Tensor, c: Tensor = None) -> Tensor:
    a = a.T if attrs.get("transA", 0) else a
    b = b.T if attrs.get("transB", 0) else b
    y = attrs.get("alpha", 1.0) * (a @ b)
    return y if c is None else y + attrs.get("beta", 1.0) * c


def _range(attrs: Attrs, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def _range_apq(attrs: Attrs) -> Tensor:
    steps = torch.arange(attrs["shape"][0], dtype=torch.int64)
    return (attrs["start"] + steps * attrs["delta"]).to(dtype_named(attrs["dtype"]))


def _trilu(attrs: Attrs, x: Tensor, k: Tensor = None) -> Tensor:
    diagonal = 0 if k is None else int(k)
    return torch.triu(x, diagonal) if attrs.get("upper", 1) else torch.tril(x, diagonal)


def _full(attrs: Attrs) -> Tensor:
    dtype = dtype_named(attrs["dtype"])
    return torch.full(attrs["shape"], attrs["value"].item(), dtype=dtype)


def _constant_of_shape(attrs: Attrs, shape: Tensor) -> Tensor:
    value = attrs.get("value")
    if value is None:
        return torch.zeros(_ints(shape))
    return torch.full(_ints(shape), value.item(), dtype=dtype_named(value.dtype.name))


def _round_cache(attrs: Attrs, x: Tensor) -> Tensor:
    """What a cache of a type holds: of int8 with one scale along an axis, of int4 in groups."""
    if attrs["dtype"] == "int4":
        return _round_groups(x.movedim(attrs["axis"], -1)).movedim(-1, attrs["axis"])
    if attrs["dtype"] != "int8":
        return x.to(dtype_named(attrs["dtype"])).to(x.dtype)
    top = x.abs().amax(attrs["axis"], keepdim=True)
    inverse = torch.where(top < 2.0**-100, 0.0, 127 / top)
    return (x * inverse).round().clamp(-127, 127) * (top / 127)


def _round_groups(x: Tensor) -> Tensor:
    """int4 along the last axis, as `apq_tvm.ops.graph.caches.coded` has it."""
    groups = x.unflatten(-1, (-1, group_size(x.shape[-1])))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    least = _bfloat16(low, low < 0)
    scale = _bfloat16((high - least) * (1 / 15), torch.ones_like(low, dtype=torch.bool))
    inverse = torch.where(scale < 1e-35, 0.0, 1 / scale)
    codes = ((groups - least) * inverse).round().clamp(0, 15)
    return (codes * scale + least).flatten(-2)


def _bfloat16(x: Tensor, away: Tensor) -> Tensor:
    """The nearest one away from zero, or towards it."""
    bits = x.contiguous().view(torch.int32)
    bits = torch.where(away & x.isfinite(), bits + 0xFFFF, bits)
    return (bits >> 16 << 16).view(torch.float32)


def _append_cache(attrs: Attrs, past: Tensor, new: Tensor, start: Tensor) -> Tensor:
    """Keys or values [B, S, N, H] put into a cache [B, N, T, H], each sequence at its own start."""
    whole = new.new_zeros(attrs["shape"])
    for b, first in enumerate(_ints(start)):
        known = 0 if past is None else min(first, past.shape[2])
        if known:
            whole[b, :, :known] = past[b, :, :known]
        part = new[b].transpose(0, 1)[:, : whole.shape[2] - first]
        whole[b, :, first : first + part.shape[1]] = part
    return whole


def _along(attrs: Attrs, x: Tensor, values: Tensor) -> Tensor:
    """Scales or zero points of QuantizeLinear and its inverse, shaped to go with x."""
    if values.ndim == 0 or values.numel() == 1:
        return values.reshape(())
    axis = attrs.get("axis", 1) % x.ndim
    if values.ndim == 1:
        return values.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    return values.repeat_interleave(attrs["block_size"], axis).narrow(axis, 0, x.shape[axis])


def _quantize_linear(attrs: Attrs, x: Tensor, scale: Tensor, zero: Tensor = None) -> Tensor:
    """Integers; where x has a gradient floats of integer value, through which it passes as if
    nothing were rounded (and not where values are clipped)."""
    dtype = DTYPES[attrs.get("output_dtype", 2)] if zero is None else zero.dtype
    limits = torch.iinfo(dtype)
    steps = x / _along(attrs, x, scale)
    codes = steps + (torch.round(steps) - steps).detach()
    if zero is not None:
        codes = codes + _along(attrs, x, zero)
    codes = torch.clamp(codes, limits.min, limits.max)
    return codes if codes.requires_grad else codes.to(dtype)


def _dequantize_linear(attrs: Attrs, x: Tensor, scale: Tensor, zero: Tensor = None) -> Tensor:
    codes = x.to(scale.dtype)
    if zero is not None:
        codes = codes - _along(attrs, x, zero).to(scale.dtype)
    return codes * _along(attrs, x, scale)


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """An operator over any number of inputs."""

    def run(attrs: Attrs, first: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            first = function(first, other)
        return first

    return run


def _depthwise(
    attrs: Attrs, x: Tensor, w: Tensor, bias: Tensor = None, residual: Tensor = None
) -> Tensor:
    return ACTIVATIONS[attrs["activation"]](depthwise(attrs, x, w, bias))


OPS: dict[str, Callable[..., Any]] = {
    **IMAGE_OPS,
    **MORE_OPS,
    **WINDOW_OPS,
    "apq.Activation": lambda attrs, x: ACTIVATIONS[attrs["activation"]](x),
    "apq.Depthwise": _depthwise,
    "apq.AppendCache": _append_cache,
    "apq.RoundCache": _round_cache,
    "apq.Embedding": _embedding,
    "apq.MatMul": _matmul,
    "apq.Softmax": _softmax_scaled,
    "apq.Gelu": lambda attrs, x: F.gelu(x, approximate=attrs["approximate"]),
    **dict.fromkeys(
        ("apq.Assume", "apq.AssumeHere", "apq.Reshape"), lambda attrs, x: x.reshape(attrs["shape"])
    ),
    "apq.Expand": lambda attrs, x: x.expand(attrs["shape"]),
    "apq.Slice": _slice_apq,
    "apq.Full": _full,
    "apq.Range": _range_apq,
    "apq.Dims": lambda attrs: torch.tensor(
        attrs["dims"], dtype=dtype_named(attrs["dtype"])
    ).reshape(attrs["shape"]),
    "Cast": lambda attrs, x: x.to(DTYPES[attrs["to"]]),
    "CastLike": lambda attrs, x, like: x.to(like.dtype),
    "Clip": _clip,
    "Concat": lambda attrs, *given: torch.cat(given, attrs["axis"]),
    "ConstantOfShape": _constant_of_shape,
    "CumSum": lambda attrs, x, axis: torch.cumsum(x, int(axis)),
    "DequantizeLinear": _dequantize_linear,
    "Div": _divide,
    "Elu": lambda attrs, x: F.elu(x, attrs.get("alpha", 1.0)),
    "Expand": _expand,
    "Flatten": lambda attrs, x: x.reshape(math.prod(x.shape[: attrs.get("axis", 1)]), -1),
    "Gather": _gather,
    "Gelu": lambda attrs, x: F.gelu(x, approximate=attrs.get("approximate", "none")),
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "LogSoftmax": lambda attrs, x: torch.log_softmax(x, attrs.get("axis", -1)),
    "Max": _folded(torch.maximum),
    "Mean": lambda attrs, *given: sum(given) / len(given),
    "Min": _folded(torch.minimum),
    "Pow": lambda attrs, x, y: torch.pow(x, y).to(x.dtype),
    "RMSNormalization": _rms_norm,
    "SimplifiedLayerNormalization": _rms_norm,
    "QuantizeLinear": _quantize_linear,
    "Range": _range,
    "ReduceL1": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, 1, axes, keep)),
    "ReduceL2": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: torch.amax(x, axes, keep)),
    "ReduceMean": _reduce(lambda x, axes, keep: torch.mean(x, axes, keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: torch.amin(x, axes, keep)),
    "ReduceSum": _reduce(lambda x, axes, keep: torch.sum(x, axes, keep)),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: x.square().sum(axes, keep)),
    "Reshape": _reshape,
    "Shape": lambda attrs, x: torch.tensor(x.shape[attrs.get("start", 0) : attrs.get("end")]),
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Squeeze": _squeeze,
    "Sum": _folded(torch.add),
    "Transpose": lambda attrs, x: x.permute(attrs.get("perm", tuple(range(x.ndim))[::-1])),
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    **{
        op: plain(function)
        for op, function in {
            "Abs": torch.abs,
            "Add": torch.add,
            "And": torch.logical_and,
            "Cos": torch.cos,
            "Equal": torch.eq,
            "Erf": torch.erf,
            "Exp": torch.exp,
            "Greater": torch.gt,
            "GreaterOrEqual": torch.ge,
            "Identity": lambda x: x,
            "IsNaN": torch.isnan,
            "Less": torch.lt,
            "LessOrEqual": torch.le,
            "Log": torch.log,
            "MatMul": torch.matmul,
            "Mul": torch.mul,
            "apq.Product": torch.mul,
            "Neg": torch.neg,
            "Not": torch.logical_not,
            "Reciprocal": torch.reciprocal,
            "Relu": torch.relu,
            "Sigmoid": torch.sigmoid,
            "Sin": torch.sin,
            "Softplus": F.softplus,
            "Sqrt": torch.sqrt,
            "Sub": torch.sub,
            "Tanh": torch.tanh,
            "Where": torch.where,
        }.items()
    },
}
"""Operator → ``(attrs, *inputs) -> output or tuple of them``; absent inputs are None.
``apq.Linear`` is not here: `torch_graph` runs it, since that is what calibration watches."""


def resolve(attrs: Attrs, symbols: Mapping[str, int]) -> dict[str, Any]:
    """Attributes with dimensions as numbers."""
    known = dict(attrs)
    for key in ("shape", "starts", "dims", "before", "begins", "ends"):
        if key in known:
            known[key] = tuple(evaluate(dim, symbols) for dim in known[key])
    if "start" in known and isinstance(known["start"], str):
        known["start"] = evaluate(known["start"], symbols)
    return known
