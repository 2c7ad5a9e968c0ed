"""Operators of ONNX beyond those of transformers, in torch, by their definition in ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = Any
Attrs = Any


def plain(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator that torch has under the same meaning."""
    return lambda attrs, *given: function(*given)


def _prelu(attrs: Attrs, x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


def _selu(attrs: Attrs, x: Tensor) -> Tensor:
    alpha, gamma = attrs.get("alpha", 1.6732632), attrs.get("gamma", 1.050701)
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


def _hard_sigmoid(attrs: Attrs, x: Tensor) -> Tensor:
    return (attrs.get("alpha", 0.2) * x + attrs.get("beta", 0.5)).clamp(0, 1)


def _shrink(attrs: Attrs, x: Tensor) -> Tensor:
    bias, edge = attrs.get("bias", 0.0), attrs.get("lambd", 0.5)
    return torch.where(x < -edge, x + bias, torch.where(x > edge, x - bias, torch.zeros_like(x)))


def _batch_norm(
    attrs: Attrs, x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor
) -> Tensor:
    return F.batch_norm(x, mean, var, gamma, beta, eps=attrs.get("epsilon", 1e-5))


def _instance_norm(attrs: Attrs, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.instance_norm(x, weight=gamma, bias=beta, eps=attrs.get("epsilon", 1e-5))


def _group_norm(attrs: Attrs, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    groups, eps = attrs["num_groups"], attrs.get("epsilon", 1e-5)
    if gamma.numel() != x.shape[1]:  # before opset 21: by group
        gamma, beta = (v.repeat_interleave(x.shape[1] // groups) for v in (gamma, beta))
    return F.group_norm(x, groups, gamma, beta, eps)


def _lrn(attrs: Attrs, x: Tensor) -> Tensor:
    alpha, beta, bias = attrs.get("alpha", 1e-4), attrs.get("beta", 0.75), attrs.get("bias", 1.0)
    size = attrs["size"]
    around = [0, 0] * (x.ndim - 2) + [(size - 1) // 2, size - 1 - (size - 1) // 2]
    squares = F.pad(x.square(), around).unfold(1, size, 1).sum(-1)
    return x / (bias + alpha / size * squares).pow(beta)


def _global(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda attrs, x: function(x, tuple(range(2, x.ndim)), keepdim=True)


def _depth_to_space(attrs: Attrs, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    block = attrs["blocksize"]
    depth = c // block**2
    if attrs.get("mode", "DCR") == "DCR":
        moved = x.reshape(n, block, block, depth, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        moved = x.reshape(n, depth, block, block, h, w).permute(0, 1, 4, 2, 5, 3)
    return moved.reshape(n, depth, h * block, w * block)


def _space_to_depth(attrs: Attrs, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    block = attrs["blocksize"]
    parts = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * block**2, h // block, w // block)


def _arg(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(attrs: Attrs, x: Tensor) -> Tensor:
        axis, keep = attrs.get("axis", 0), bool(attrs.get("keepdims", 1))
        if not attrs.get("select_last_index", 0):
            return function(x, axis, keepdim=keep)
        return x.shape[axis] - 1 - function(x.flip(axis), axis, keepdim=keep)

    return run


def _top_k(attrs: Attrs, x: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Of equal values the one with the lower index comes first, which `torch.topk` leaves open."""
    axis, many = attrs.get("axis", -1), int(k.reshape(-1)[0])
    values, order = torch.sort(x, dim=axis, descending=bool(attrs.get("largest", 1)), stable=True)
    return values.narrow(axis, 0, many), order.narrow(axis, 0, many)


def _gather_elements(attrs: Attrs, x: Tensor, index: Tensor) -> Tensor:
    axis = attrs.get("axis", 0) % x.ndim
    return torch.gather(x, axis, torch.where(index < 0, index + x.shape[axis], index).long())


def _gather_nd(attrs: Attrs, x: Tensor, index: Tensor) -> Tensor:
    batch, depth = attrs.get("batch_dims", 0), index.shape[-1]
    lead = [
        torch.arange(x.shape[i]).reshape([-1 if j == i else 1 for j in range(index.ndim - 1)])
        for i in range(batch)
    ]
    return x[(*lead, *(index[..., i] for i in range(depth)))]


def _scatter_elements(attrs: Attrs, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    axis = attrs.get("axis", 0) % x.ndim
    index = torch.where(index < 0, index + x.shape[axis], index).long()
    how = {"none": "", "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[
        attrs.get("reduction", "none")
    ]
    if not how:
        return torch.scatter(x, axis, index, updates)
    return torch.scatter_reduce(x, axis, index, updates, how)


def _scatter_nd(attrs: Attrs, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    how = attrs.get("reduction", "none")
    at = tuple(index[..., i] for i in range(index.shape[-1]))
    if how in ("none", "add"):
        return x.index_put(at, updates, accumulate=how == "add")
    result, flat = x.clone(), index.reshape(-1, index.shape[-1])
    join = {"mul": torch.mul, "max": torch.maximum, "min": torch.minimum}[how]
    pieces = updates.reshape(len(flat), *updates.shape[index.ndim - 1 :])
    for place, piece in zip(flat.tolist(), pieces, strict=True):
        result[tuple(place)] = join(result[tuple(place)], piece)
    return result


def _one_hot(attrs: Attrs, index: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    count, axis = int(depth.reshape(-1)[0]), attrs.get("axis", -1) % (index.ndim + 1)
    index = index.long()
    index = torch.where(index < 0, index + count, index).unsqueeze(axis)
    places = torch.arange(count).reshape([-1 if i == axis else 1 for i in range(index.ndim)])
    return torch.where(index == places, values[1], values[0])


def _dynamic_quantize(attrs: Attrs, x: Tensor) -> tuple[Tensor, ...]:
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.round((-low / divisor).clamp(0, 255))
    codes = (torch.round(x / divisor) + zero).clamp(0, 255)
    return codes.to(torch.uint8), scale, zero.to(torch.uint8)


def _product_reduced(attrs: Attrs, x: Tensor, *axes: Tensor) -> Tensor:
    given = axes[0].tolist() if axes and axes[0] is not None else attrs.get("axes")
    if not given and attrs.get("noop_with_empty_axes", 0):
        return x
    for axis in sorted((a % x.ndim for a in given or range(x.ndim)), reverse=True):
        x = x.prod(axis, keepdim=bool(attrs.get("keepdims", 1)))
    return x


def _log_sum(power: bool) -> Callable[..., Tensor]:
    def run(attrs: Attrs, x: Tensor, *axes: Tensor) -> Tensor:
        given = axes[0].tolist() if axes and axes[0] is not None else attrs.get("axes")
        if not given and attrs.get("noop_with_empty_axes", 0):
            return x
        at, keep = list(given or range(x.ndim)), bool(attrs.get("keepdims", 1))
        return torch.logsumexp(x, at, keep) if power else torch.log(x.sum(at, keep))

    return run


def _modulo(attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    return torch.fmod(a, b) if attrs.get("fmod", 0) else torch.remainder(a, b)


def _cum_prod(attrs: Attrs, x: Tensor, axis: Tensor) -> Tensor:
    return torch.cumprod(x, int(axis))


def _reverse_sequence(attrs: Attrs, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = attrs.get("time_axis", 0), attrs.get("batch_axis", 1)
    moved = x.movedim((batch, time), (0, 1)).clone()
    for row, length in zip(moved, lengths.tolist(), strict=True):
        row[:length] = row[:length].flip(0)
    return moved.movedim((0, 1), (batch, time))


_COMPARED = (torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne)


def _trees(attrs: Attrs, x: Tensor, *tables: Tensor) -> Tensor:
    nodes, first, targets, values, roots, depths, *rest = tables
    features, thresholds, yes, no = nodes.T.contiguous()
    thresholds = thresholds.view(torch.float32) if x.dtype == torch.float32 else rest.pop(0)
    at = roots.reshape(-1).long().expand(len(x), -1)
    for _ in range(int(depths.max())):
        value, threshold = x.gather(1, features[at].long()), thresholds[at]
        modes = [_COMPARED[mode](value, threshold) for mode in attrs["modes"]]
        answer = modes[0]
        for mode, other in zip(attrs["modes"][1:], modes[1:], strict=True):
            answer = torch.where(rest[0][at] == mode, other, answer)
        if attrs["missing"]:
            answer = answer | (torch.isnan(value) & (rest[-1][at] != 0))
        at = torch.where(answer, yes[at], no[at]).long()
    start = {"SUM": 0.0, "MIN": torch.inf, "MAX": -torch.inf}[attrs["how"]]
    reduce = {"SUM": "sum", "MIN": "amin", "MAX": "amax"}[attrs["how"]]
    sums = []
    for row in at:
        said = torch.cat([torch.arange(first[i], first[i + 1]) for i in row.tolist()])
        one = torch.full((attrs["targets"],), start, dtype=x.dtype)
        sums.append(one.scatter_reduce(0, targets[said].long(), values[said], reduce))
    return torch.stack(sums)


MORE_OPS: dict[str, Callable[..., Any]] = {
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "BatchNormalization": _batch_norm,
    "CumProd": _cum_prod,
    "DepthToSpace": _depth_to_space,
    "DynamicQuantizeLinear": _dynamic_quantize,
    "Einsum": lambda attrs, *given: torch.einsum(attrs["equation"], *given),
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "GlobalAveragePool": _global(torch.mean),
    "GlobalMaxPool": _global(torch.amax),
    "GroupNormalization": _group_norm,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda attrs, x: F.hardswish(x),
    "InstanceNormalization": _instance_norm,
    "LRN": _lrn,
    "LeakyRelu": lambda attrs, x: F.leaky_relu(x, attrs.get("alpha", 0.01)),
    "Mish": lambda attrs, x: F.mish(x),
    "Mod": _modulo,
    "OneHot": _one_hot,
    "PRelu": _prelu,
    "ReduceLogSum": _log_sum(False),
    "apq.Trees": _trees,
    "ReduceLogSumExp": _log_sum(True),
    "ReduceProd": _product_reduced,
    "ReverseSequence": _reverse_sequence,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Selu": _selu,
    "Shrink": _shrink,
    "Size": lambda attrs, x: torch.tensor(x.numel()),
    "Softsign": lambda attrs, x: F.softsign(x),
    "SpaceToDepth": _space_to_depth,
    "ThresholdedRelu": lambda attrs, x: torch.where(x > attrs.get("alpha", 1.0), x, 0.0),
    "Tile": lambda attrs, x, times: x.repeat([int(t) for t in times.tolist()]),
    "apq.Tile": lambda attrs, x: x.repeat(
        [whole // max(own, 1) for whole, own in zip(attrs["shape"], x.shape, strict=True)]
    ),
    "TopK": _top_k,
    **{
        op: plain(function)
        for op, function in {
            "Acos": torch.acos,
            "Acosh": torch.acosh,
            "Asin": torch.asin,
            "Asinh": torch.asinh,
            "Atan": torch.atan,
            "Atanh": torch.atanh,
            "BitwiseAnd": torch.bitwise_and,
            "BitwiseNot": torch.bitwise_not,
            "BitwiseOr": torch.bitwise_or,
            "BitwiseXor": torch.bitwise_xor,
            "Ceil": torch.ceil,
            "Cosh": torch.cosh,
            "Floor": torch.floor,
            "Or": torch.logical_or,
            "Round": torch.round,
            "Sign": torch.sign,
            "Sinh": torch.sinh,
            "Tan": torch.tan,
            "Xor": torch.logical_xor,
        }.items()
    },
}
"""As `apq_tvm.quantizers.torch.ops.OPS`."""
