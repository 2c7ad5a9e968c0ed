"""ONNX Runtime's linear layers, built in memory: what a user would run instead of ours.

A rival's model holds several copies of the layer side by side, each with its own weights and its
own input, so that one call of the session reads all of them as a real model would, and the cost of
the call itself is shared. Every rival knows the float64 result of *its own* codes, so that its
error is what its kernel adds: rounded activations, and saturation where the instruction saturates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.bench.timing import Candidate, cold_copies
from apq_tvm.errors import BadInput
from apq_tvm.evaluate import open_session
from apq_tvm.types import Array

MS_DOMAIN = "com.microsoft"

SATURATED = 0.03
"""A relative error beyond this at the extremes is saturation: rounding to int8 stays below 0.01."""


@dataclass(frozen=True)
class Layer:
    """One quantized layer as a rival stores it.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        Its initializers by short name; the node of copy `i` reads ``{short name}{i}``.
    weight : float64 [N, K]
        What its codes mean.
    """

    arrays: Mapping[str, Array]
    weight: NDArray[np.float64]

    @property
    def nbytes(self) -> int:
        """Weight bytes that one call reads."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True)
class Rival:
    """One way of ONNX Runtime to compute a linear layer.

    Parameters
    ----------
    name : str
        With block size and accuracy level.
    quantize : callable
        float32 [N, K] to `Layer`.
    nodes : callable
        ``nodes(i, n, k)`` gives the ONNX nodes of copy `i`, from input ``x{i}`` to output ``y{i}``.
    """

    name: str
    quantize: Callable[[NDArray[np.float32]], Layer]
    nodes: Callable[[int, int, int], list[Any]]


def _onnx() -> Any:
    """Import onnx's helpers only when a rival is built."""
    import onnx
    from onnx import helper, numpy_helper

    return onnx, helper, numpy_helper


def pack_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes along the last axis, low bits first, as MatMulNBits stores them (2, 4 or 8 bits).

    Parameters
    ----------
    codes : uint8 [..., K]
        K a multiple of 8 / bits.
    bits : int

    Returns
    -------
    uint8 [..., K * bits / 8]
    """
    per_byte = 8 // bits
    split = codes.reshape(*codes.shape[:-1], -1, per_byte)  # [..., K/per_byte, per_byte]
    shifts = (np.arange(per_byte) * bits).astype(np.uint8)
    packed: NDArray[np.uint8] = np.bitwise_or.reduce(split << shifts, axis=-1).astype(np.uint8)
    return packed


def matmul_nbits(bits: int, block: int, accuracy_level: int) -> Rival:
    """com.microsoft MatMulNBits: symmetric, blocks along K; level 4 rounds activations to int8."""

    def quantize(weight: NDArray[np.float32]) -> Layer:
        n, k = weight.shape
        blocks = -(-k // block)
        padded = np.zeros((n, blocks * block), np.float32)
        padded[:, :k] = weight
        groups = padded.reshape(n, blocks, block)  # [N, blocks, block]
        zero = 2 ** (bits - 1)
        scales = np.abs(groups).max(axis=2) / max(zero - 1, 1)  # [N, blocks]
        scales = np.where(scales == 0, 1.0, scales).astype(np.float32)
        codes = np.clip(np.rint(groups / scales[..., None]) + zero, 0, 2**bits - 1)
        codes = codes.astype(np.uint8)
        meaning = (codes.astype(np.float64) - zero) * scales[..., None]
        packed = pack_bits(codes, bits)  # [N, blocks, block * bits / 8]
        return Layer({"w": packed, "s": scales}, meaning.reshape(n, -1)[:, :k])

    def nodes(i: int, n: int, k: int) -> list[Any]:
        sizes = {"K": k, "N": n, "bits": bits, "block_size": block}
        node = _onnx()[1].make_node(
            "MatMulNBits",
            [f"x{i}", f"w{i}", f"s{i}"],
            [f"y{i}"],
            domain=MS_DOMAIN,
            accuracy_level=accuracy_level,
            **sizes,
        )
        return [node]

    name = f"onnxruntime MatMulNBits W{bits} block {block} accuracy_level {accuracy_level}"
    return Rival(name, quantize, nodes)


def float32() -> Rival:
    """Plain MatMul in float32."""

    def quantize(weight: NDArray[np.float32]) -> Layer:
        return Layer({"w": np.ascontiguousarray(weight.T)}, weight.astype(np.float64))

    def nodes(i: int, n: int, k: int) -> list[Any]:
        return [_onnx()[1].make_node("MatMul", [f"x{i}", f"w{i}"], [f"y{i}"])]

    return Rival("onnxruntime MatMul fp32", quantize, nodes)


def int8_dynamic() -> Rival:
    """DynamicQuantizeLinear and MatMulInteger, as quantize_dynamic makes them; per row."""

    def quantize(weight: NDArray[np.float32]) -> Layer:
        scales = np.maximum(np.abs(weight).max(axis=1), 1e-30).astype(np.float32) / 127  # [N]
        codes = np.rint(weight / scales[:, None]).astype(np.int8)  # [N, K]
        meaning = codes.astype(np.float64) * scales[:, None]
        return Layer({"w": np.ascontiguousarray(codes.T), "s": scales}, meaning)

    def nodes(i: int, n: int, k: int) -> list[Any]:
        make = _onnx()[1].make_node
        return [
            make("DynamicQuantizeLinear", [f"x{i}"], [f"q{i}", f"qs{i}", f"qz{i}"]),
            make("MatMulInteger", [f"q{i}", f"w{i}", f"qz{i}"], [f"acc{i}"]),
            make("Cast", [f"acc{i}"], [f"accf{i}"], to=1),
            make("Mul", [f"qs{i}", f"s{i}"], [f"scale{i}"]),
            make("Mul", [f"accf{i}", f"scale{i}"], [f"y{i}"]),
        ]

    name = "onnxruntime int8 dynamic (DynamicQuantizeLinear + MatMulInteger)"
    return Rival(name, quantize, nodes)


RIVALS: Mapping[str, Rival] = {
    "ort-w2-b128": matmul_nbits(2, 128, 4),
    "ort-w4-b128": matmul_nbits(4, 128, 4),
    "ort-w4-b32": matmul_nbits(4, 32, 4),
    "ort-w4-b32-float": matmul_nbits(4, 32, 0),
    "ort-w8-b128": matmul_nbits(8, 128, 4),
    "ort-int8": int8_dynamic(),
    "ort-fp32": float32(),
}
"""By the name ``--against`` takes."""

EVERY = "onnxruntime-all"


def strongest(bits: int) -> str:
    """What ``--against onnxruntime`` means: the fewest bits that hold `bits`, in blocks of 128."""
    for have in (2, 4, 8):
        if bits <= have:
            return f"ort-w{have}-b128"
    return "ort-fp32"


def parse_against(text: str, bits: int) -> list[Rival]:
    """Read ``--against``: a comma list of `RIVALS`, ``onnxruntime`` or ``onnxruntime-all``.

    Raises
    ------
    BadInput
        A name is unknown; the message lists those that are.
    """
    names: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if word == "onnxruntime":
            names.append(strongest(bits))
        elif word == EVERY:
            names.extend(RIVALS)
        elif word in RIVALS:
            names.append(word)
        else:
            known = ", ".join(("onnxruntime", EVERY, *RIVALS))
            raise BadInput(f"unknown rival {word!r} in --against; known: {known}")
    return [RIVALS[name] for name in dict.fromkeys(names)]


def _model(rival: Rival, layer: Layer, count: int) -> bytes:
    """The rival's ONNX model with `count` copies side by side."""
    onnx, helper, numpy_helper = _onnx()
    n, k = layer.weight.shape
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node for i in range(count) for node in rival.nodes(i, n, k)],
        "rival",
        [tensor(f"x{i}", onnx.TensorProto.FLOAT, ["m", k]) for i in range(count)],
        [tensor(f"y{i}", onnx.TensorProto.FLOAT, ["m", n]) for i in range(count)],
        # rolled along the first axis, so that no two copies hold the same bytes
        [
            numpy_helper.from_array(np.roll(array, i, axis=0), f"{name}{i}")
            for i in range(count)
            for name, array in layer.arrays.items()
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MS_DOMAIN, 1)]
    serialized: bytes = helper.make_model(
        graph, opset_imports=opsets, ir_version=8
    ).SerializeToString()
    return serialized


class RivalLayer:
    """A rival's session for one layer and number of threads.

    Parameters
    ----------
    rival : Rival
    weight : float32 [N, K]
    threads : int
    cold : bool
        True holds copies of the weights, together larger than the caches, and reads all of them.

    Raises
    ------
    MissingPackage
        onnxruntime is not installed.
    """

    def __init__(self, rival: Rival, weight: NDArray[np.float32], threads: int, cold: bool) -> None:
        self.name = rival.name
        self.layer = rival.quantize(weight)
        self.copies = cold_copies(self.layer.nbytes) if cold else 1
        self._session = open_session(_model(rival, self.layer, self.copies), threads)

    def candidate(self, x: NDArray[np.float32]) -> Candidate:
        """Return what is timed for activations `x`, float32 [M, K]; memory is bound beforehand."""
        import onnxruntime

        y = np.empty((len(x), len(self.layer.weight)), np.float32)
        out = onnxruntime.OrtValue.ortvalue_from_numpy(y)
        binding = self._session.io_binding()
        for i in range(self.copies):
            binding.bind_cpu_input(f"x{i}", x)
            binding.bind_ortvalue_output(f"y{i}", out)

        def run(repeats: int) -> None:
            for _ in range(repeats):
                self._session.run_with_iobinding(binding)

        return Candidate(run, self.copies)

    def output(self, x: NDArray[np.float32]) -> Array:
        """Return the result of copy 0, float32 [M, N]."""
        result: Array = self._session.run(["y0"], {f"x{i}": x for i in range(self.copies)})[0]
        return result


def relative_error(
    y: Array, x: NDArray[np.float32], weight: NDArray[np.float64]
) -> tuple[float, float]:
    """Mean and largest error of ``y`` against ``x @ weight.T`` in float64.

    Both are relative to the root mean square of the exact result.
    """
    exact = x.astype(np.float64) @ weight.T
    error = np.abs(y.astype(np.float64) - exact)
    size = float(np.sqrt(np.mean(exact**2))) or 1.0
    return float(error.mean()) / size, float(error.max()) / size


def saturates(rival: Rival, k: int = 512, n: int = 64) -> bool:
    """Whether the rival's integer sums overflow on this machine at the extremes of its codes.

    All weights are the largest there is and so are all activations: an instruction that adds pairs
    of u8 by s8 products in int16 with saturation then loses more than half of the sum.
    """
    weight = np.ones((n, k), np.float32)
    weight[: n // 2] = -1
    x = np.ones((4, k), np.float32)
    x[2:] = -1
    built = RivalLayer(rival, weight, threads=1, cold=False)
    return relative_error(built.output(x), x, built.layer.weight)[1] > SATURATED
