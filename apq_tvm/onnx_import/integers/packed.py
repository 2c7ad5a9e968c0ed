"""Weights that ONNX Runtime packs: ``MatMulNBits``, ``MatMulBnb4``, ``GatherBlockQuantized``.

The packing is that of onnxruntime's docs/ContribOperators.md: codes of 2 and 4 bits lie in bytes,
the first one in the lowest bits. ``accuracy_level``, which says how ONNX Runtime may round
activations, has no say here: the scheme the user chose for activations decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from apq_tvm.errors import BadScheme, ImportFailed, UnsupportedModel
from apq_tvm.formats.order import column_order
from apq_tvm.onnx_import.graph import FLOATS, Graph
from apq_tvm.onnx_import.integers.codes import CODE_BITS, Codes, check_scales
from apq_tvm.onnx_import.passes.linear import linear
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.types import Array, Node

BITS = (2, 4, 8)
"""Widths ONNX Runtime computes on CPUs; the operators' specification allows no others for these."""


_FP4 = (0.0, 0.0052083333, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25)
FP4 = (*_FP4, *(-level for level in _FP4))
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
BNB4 = (FP4, NF4)
"""What the codes of ``MatMulBnb4`` mean, by ``quant_type``: bitsandbytes' floats of 4 bits, and
quantiles of a normal distribution (QLoRA, arXiv:2305.14314, appendix E)."""


def unpack(packed: Array, bits: int, count: int) -> Array:
    """Codes of the last axis: uint8 [..., bytes] to uint8 [..., count], lowest bits first."""
    if bits == 8:
        return packed[..., :count]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :count]


def matmul_nbits(graph: Graph, node: Node) -> list[Node]:
    """``com.microsoft.MatMulNBits`` as ``apq.Linear`` with the matrix its codes mean.

    Raises
    ------
    ImportFailed
        The packed arrays do not have the sizes that N, K, bits and block_size ask for.
    UnsupportedModel
        Bits that nothing computes, weights that are no constants or lie in a device's own order,
        a ``g_idx`` that does not fill its groups.
    """
    x, packed, scales, zeros, g_idx, bias = (*node.inputs, "", "", "", "")[:6]
    name = f"MatMulNBits {node.name!r}"
    n, k, size = (_positive(node, key, name) for key in ("N", "K", "block_size"))
    _check_floats(graph, x, name)
    bits = int(node.attrs.get("bits", 4))
    check_bits(bits, name)
    if size < 16 or size & (size - 1):
        raise ImportFailed(f"{name} has block_size {size}; powers of two from 16 on are legal")
    if node.attrs.get("weight_prepacked", 0):
        raise UnsupportedModel(
            f"{name}: its weights are prepacked for one device (weight_prepacked); "
            "save the model without that"
        )
    blocks = -(-k // size)
    codes = constant(graph, packed, "weight", name)
    count = n * blocks * size * bits // 8
    check_size(codes, "uint8", count, f"N={n}, K={k}, bits={bits}", packed, name)
    values = unpack(codes.reshape(n, -1), bits, blocks * size)[:, :k]
    scale = scales_of(graph, scales, n * blocks, name).reshape(n, blocks)
    order = _order(graph, g_idx, k, size, name)
    middle = 1 << (bits - 1)
    zero = np.full((n, blocks), middle)
    if zeros:
        zero = _zeros(graph, zeros, bits, n, blocks, name)
    source = f"MatMulNBits of {bits} bits in blocks of {size}"
    nodes: list[Node] = []
    if order is not None:
        values, source = values[:, order], f"{source}, columns sorted by group"
        nodes, x = _gathered(graph, node, x, order)
    kept = Codes(values, bits, 0, scale, zero, (1, min(size, k)), source)
    weight = store(graph, packed, f".{n}x{k}.b{bits}g{size}.{scales}.{zeros}.{g_idx}", kept)
    y = graph.fresh(f"{node.name}.product") if bias else node.outputs[0]
    nodes += linear(graph, node, x, weight, y)
    if bias:
        nodes.append(Node("Add", graph.fresh(f"{node.name}.bias"), (y, bias), node.outputs))
    return nodes


def matmul_bnb4(graph: Graph, node: Node) -> list[Node]:
    """``com.microsoft.MatMulBnb4`` as ``apq.Linear`` with the matrix its codes mean.

    Blocks run on over rows, the first of two codes lies in the higher bits. No format here has
    these levels: the layer is quantized by the scheme, like one that came in floats.

    Raises
    ------
    ImportFailed
        The packed arrays do not have the sizes that N, K and block_size ask for.
    UnsupportedModel
        Weights that are no constants, or of another type than FP4 and NF4.
    """
    x, packed, absmax = node.inputs[:3]
    name = f"MatMulBnb4 {node.name!r}"
    n, k, size = (_positive(node, key, name) for key in ("N", "K", "block_size"))
    kind = int(node.attrs.get("quant_type", 1))
    if kind not in range(len(BNB4)):
        raise UnsupportedModel(f"{name}: quant_type {kind} is neither 0 (FP4) nor 1 (NF4)")
    _check_floats(graph, x, name)
    weight, count = f"{packed}.{n}x{k}.bnb{kind}g{size}.{absmax}", n * k
    if weight not in graph.weights:
        codes = constant(graph, packed, "weight", name)
        check_size(codes, "uint8", -(-count // 2), f"N={n}, K={k}", packed, name)
        both = np.stack([codes.reshape(-1) >> 4, codes.reshape(-1) & 15], axis=1)
        level = np.array(BNB4[kind], np.float32)[both.reshape(-1)[:count]]
        scale = scales_of(graph, absmax, -(-count // size), name).reshape(-1)
        graph.weights[weight] = (level * scale[np.arange(count) // size]).reshape(n, k)
    return linear(graph, node, x, weight, node.outputs[0])


def store(graph: Graph, source: str, suffix: str, codes: Codes) -> str:
    """The matrix that `codes` mean as a weight with codes, stored once for equal names."""
    name = f"{source}{suffix}".rstrip(".")
    if name not in graph.weights:
        graph.weights[name] = meaning(codes)
        graph.codes[name] = codes
    return name


def meaning(codes: Codes) -> Array:
    """The float32 matrix of `codes`: ``(value - zero) * scale``."""
    rows, columns = codes.values.shape

    def spread(entries: Array) -> Array:
        tall = entries if codes.block[0] == 1 else np.repeat(entries, codes.block[0], axis=0)
        wide = tall if codes.block[1] == 1 else np.repeat(tall, codes.block[1], axis=1)
        return wide[:rows, :columns]

    values = codes.values.astype(np.float32)
    if codes.zero is not None:
        values -= spread(codes.zero.astype(np.float32))
    values *= spread(codes.scale)
    return values


def gather_block_quantized(graph: Graph, node: Node) -> list[Node]:
    """``com.microsoft.GatherBlockQuantized`` as Gather from the table its codes mean.

    ONNX Runtime answers an id outside the table with zeros; a compiled module refuses it.

    Raises
    ------
    ImportFailed
        Packed arrays of the wrong sizes.
    UnsupportedModel
        Tables that are no constant matrix of rows, or of floats of 8 bits.
    """
    data, ids, scales, zeros = (*node.inputs, "")[:4]
    name = f"GatherBlockQuantized {node.name!r}"
    table = constant(graph, data, "table", name)
    if table.ndim != 2:
        raise UnsupportedModel(f"{name}: its table {graph.describe(data)} is no matrix")
    gathered, cut = (int(node.attrs.get(key, default)) for key, default in _AXES)
    if gathered not in (0, -2) or cut not in (1, -1):
        raise UnsupportedModel(f"{name}: only rows (gather_axis 0) in blocks along axis 1 work")
    size, dtype = int(node.attrs.get("block_size", 128)), table.dtype.name
    if dtype not in CODE_BITS:
        raise UnsupportedModel(f"{name}: a table of {dtype}; integers of 2, 4 and 8 bits work")
    if size < 16 or size & (size - 1):
        raise ImportFailed(f"{name} has block_size {size}; powers of two from 16 on are legal")
    bits = int(node.attrs.get("bits", 4)) if dtype == "uint8" else CODE_BITS[dtype]
    check_bits(bits, name)
    packed = dtype == "uint8"
    rows, width = table.shape[0], table.shape[1] * 8 // bits if packed else table.shape[1]
    values = unpack(table, bits, width) if packed else table
    blocks = -(-width // size)
    scale = scales_of(graph, scales, rows * blocks, name).reshape(rows, blocks)
    low = -(1 << (bits - 1)) if dtype.startswith("int") else 0
    zero: Array | None = np.full((rows, blocks), 1 << (bits - 1)) if packed else None
    if zeros and packed:
        zero = _zeros(graph, zeros, bits, rows, blocks, name)
    elif zeros:
        given = constant(graph, zeros, "zero points", name)
        check_size(given, dtype, rows * blocks, f"a table of {rows}x{width}", zeros, name)
        zero = given.reshape(rows, blocks).astype(np.int32)
    source = f"GatherBlockQuantized of {bits} bits in blocks of {size}"
    kept = Codes(values, bits, low, scale, zero, (1, min(size, width)), source)
    weight = store(graph, data, f".{rows}x{width}.b{bits}g{size}.{scales}.{zeros}", kept)
    return [Node("Gather", node.name, (weight, ids), node.outputs, {"axis": 0})]


_AXES = (("gather_axis", 0), ("quantize_axis", 1))


def _positive(node: Node, key: str, name: str) -> int:
    value: Any = node.attrs.get(key)
    if not isinstance(value, int) or value < 1:
        raise ImportFailed(f"{name} has {key}={value!r}; a positive integer is needed")
    return value


def _check_floats(graph: Graph, x: str, name: str) -> None:
    if graph.dtype(x) not in FLOATS:
        raise ImportFailed(f"{name}: its input {graph.describe(x)} is no tensor of floats")


def check_bits(bits: int, name: str) -> None:
    """Refuse widths that are not among `BITS`."""
    if bits not in BITS:
        raise UnsupportedModel(
            f"{name} has codes of {bits} bits; {', '.join(map(str, BITS))} can be read: quantize "
            "the float model with this compiler, which has every width"
        )


def constant(graph: Graph, value: str, what: str, name: str) -> Array:
    """An array of the file; refused where it is an input or computed."""
    array = graph.weights.get(value)
    if array is None:
        raise UnsupportedModel(f"{name}: its {what} {value!r} is no constant of the file")
    return array


def check_size(array: Array, dtype: str, count: int, why: str, value: str, name: str) -> None:
    """Refuse an array of another type or with another number of entries; `why` it has to have so
    many."""
    if array.dtype.name != dtype or array.size != count:
        raise ImportFailed(
            f"{name}: {value!r} is {array.dtype.name} {list(array.shape)} with {array.size} "
            f"entries; {why} needs {count} of {dtype}"
        )


def scales_of(graph: Graph, value: str, count: int, name: str) -> Array:
    """Scales as float32, finite and as many as there are blocks."""
    array = constant(graph, value, "scales", name)
    if array.dtype.kind != "f" or array.size != count:
        raise ImportFailed(
            f"{name}: its scales {value!r} are {array.dtype.name} {list(array.shape)}; {count} "
            "floats are needed, one per block"
        )
    check_scales(array, value)
    return array.astype(np.float32)


def _zeros(graph: Graph, value: str, bits: int, n: int, blocks: int, name: str) -> Array:
    """Zero points [N, blocks]: packed like the codes, or floats."""
    array = constant(graph, value, "zero points", name)
    if array.dtype.kind == "f":
        check_size(array, array.dtype.name, n * blocks, f"{n}x{blocks} blocks", value, name)
        if not np.isfinite(array).all():
            raise UnsupportedModel(f"{name}: zero points {value!r} are NaN or infinite")
        return array.reshape(n, blocks)
    count = -(-blocks * bits // 8)
    check_size(array, "uint8", n * count, f"{n}x{blocks} packed blocks", value, name)
    return unpack(array.reshape(n, count), bits, blocks)


def _order(graph: Graph, value: str, k: int, size: int, name: str) -> Array | None:
    """In which order columns lie in runs of groups; None if they do so as they are."""
    if not value:
        return None
    array = constant(graph, value, "g_idx", name).reshape(-1)
    if array.size < k:
        raise ImportFailed(f"{name}: its g_idx {value!r} has {array.size} entries for K={k}")
    try:
        return column_order(array[:k], size)
    except BadScheme as error:
        raise UnsupportedModel(f"{name}: {error}") from error


def _gathered(graph: Graph, node: Node, x: str, order: Array) -> tuple[list[Node], str]:
    """Columns of `x` in another order, once for layers that read the same in the same order."""
    for other in graph.nodes:
        if other.op == "Gather" and other.inputs[0] == x and other.attrs.get("axis") == -1:
            if np.array_equal(graph.weights.get(other.inputs[1], ()), order):
                return [], other.outputs[0]
    constant = graph.add_weight(f"{node.name}.order", order)
    result = graph.fresh(f"{node.name}.sorted")
    name = graph.fresh(f"{node.name}.gather")
    gather = Node("Gather", name, (x, constant), (result,), {"axis": -1})
    infer(graph, gather)
    return [gather], result
