"""Operators that are written in others, with the types and shapes of their inputs at hand.

`fold` calls a rule as soon as it meets the operator, and goes on with the nodes it returns.
"""

from __future__ import annotations

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import.control.branches import branch
from apq_tvm.onnx_import.control.chosen import chosen_sizes
from apq_tvm.onnx_import.control.entries import largest_entries
from apq_tvm.onnx_import.control.loops import loop, move_first, scan
from apq_tvm.onnx_import.control.sequences import SEQUENCES
from apq_tvm.onnx_import.conv.deform import deform_conv
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.integers.bert import quantized_attention, quantized_embeddings
from apq_tvm.onnx_import.integers.packed import (
    gather_block_quantized,
    matmul_bnb4,
    matmul_nbits,
)
from apq_tvm.onnx_import.integers.qlinear import QLINEAR
from apq_tvm.onnx_import.integers.quantized import dynamic_quantize_matmul, standard
from apq_tvm.onnx_import.operators.bert import embed_layer_norm, packed_attention
from apq_tvm.onnx_import.operators.blocked import dequantize, quantize
from apq_tvm.onnx_import.operators.boxes import scatter_nd
from apq_tvm.onnx_import.operators.classical.rows import ROWS
from apq_tvm.onnx_import.operators.classical.scores import SCORES
from apq_tvm.onnx_import.operators.classical.svm import SVM
from apq_tvm.onnx_import.operators.classical.trees import TREES
from apq_tvm.onnx_import.operators.contrib import CONTRIB
from apq_tvm.onnx_import.operators.einsum import einsum
from apq_tvm.onnx_import.operators.experts import mixture, quantized_mixture
from apq_tvm.onnx_import.operators.fourier import dft, stft
from apq_tvm.onnx_import.operators.fused import fused_conv, fused_gemm, fused_matmul
from apq_tvm.onnx_import.operators.grids import affine_grid
from apq_tvm.onnx_import.operators.group_query import group_query_attention
from apq_tvm.onnx_import.operators.multi_head import multi_head_attention
from apq_tvm.onnx_import.operators.onnx_attention import onnx_attention
from apq_tvm.onnx_import.operators.other_types import OTHER_TYPES, Rule, in_float32
from apq_tvm.onnx_import.operators.random import RANDOM
from apq_tvm.onnx_import.operators.recurrent.operators import gru, lstm, rnn
from apq_tvm.onnx_import.operators.recurrent.quantized import dynamic_quantize_lstm
from apq_tvm.onnx_import.operators.rms_norm import simplified_layer_norm, skip_simplified_layer_norm
from apq_tvm.onnx_import.operators.rotary import contrib_rotary, onnx_rotary
from apq_tvm.onnx_import.operators.standard import (
    batch_normalization,
    conv_transpose,
    det,
    dropout,
    group_normalization,
    inverse,
    lp_normalization,
    max_unpool,
    normalization,
    space_to_depth,
    squeeze,
    tile,
)
from apq_tvm.onnx_import.operators.whole_numbers import (
    gemm,
    grid_sample,
    reduce_mean,
    reduce_root_or_log,
)
from apq_tvm.onnx_import.run_sizes.resize import resize
from apq_tvm.onnx_import.run_sizes.selections import SELECTIONS
from apq_tvm.onnx_import.run_sizes.shape_inputs import SHAPE_INPUTS
from apq_tvm.types import Node

EXPANSIONS: dict[str, Rule] = {
    "AffineGrid": affine_grid,
    "Attention": in_float32(onnx_attention, outputs=(0, 1, 2, 3)),
    "GRU": gru,
    "If": branch,
    "LSTM": lstm,
    "Loop": loop,
    "RNN": rnn,
    "BatchNormalization": batch_normalization,
    "ConvTranspose": conv_transpose,
    "DFT": in_float32(dft),
    "DeformConv": in_float32(deform_conv),
    "DequantizeLinear": dequantize,
    "Det": det,
    "Dropout": dropout,
    "Einsum": einsum,
    "Gemm": gemm,
    "GridSample": grid_sample,
    "GroupNormalization": group_normalization,
    "LayerNormalization": in_float32(normalization),
    "LpNormalization": lp_normalization,
    "MaxUnpool": max_unpool,
    "ReduceL2": reduce_root_or_log,
    "ReduceLogSum": reduce_root_or_log,
    "ReduceLogSumExp": reduce_root_or_log,
    "ReduceMean": reduce_mean,
    "Resize": resize,
    "QuantizeLinear": quantize,
    "RMSNormalization": in_float32(normalization),
    "RotaryEmbedding": onnx_rotary,
    "Scan": scan,
    "ScatterND": scatter_nd,
    "SimplifiedLayerNormalization": simplified_layer_norm,
    "SpaceToDepth": space_to_depth,
    "Squeeze": squeeze,
    "STFT": in_float32(stft),
    "Tile": tile,
    "SkipSimplifiedLayerNormalization": skip_simplified_layer_norm,
    "Upsample": resize,
    "apq.EndIf": chosen_sizes,
    "apq.EndLoop": largest_entries,
    "apq.Gelu": in_float32(),
    "apq.MoveFirst": move_first,
    "com.microsoft.Attention": packed_attention,
    "com.microsoft.DequantizeLinear": standard,
    "com.microsoft.DynamicQuantizeLSTM": dynamic_quantize_lstm,
    "com.microsoft.DynamicQuantizeMatMul": dynamic_quantize_matmul,
    "com.microsoft.EmbedLayerNormalization": embed_layer_norm,
    "com.microsoft.FusedConv": fused_conv,
    "com.microsoft.FusedGemm": fused_gemm,
    "com.microsoft.FusedMatMul": fused_matmul,
    "com.microsoft.GatherBlockQuantized": gather_block_quantized,
    "com.microsoft.GroupQueryAttention": group_query_attention,
    "com.microsoft.Inverse": inverse,
    "com.microsoft.MatMulIntegerToFloat": dynamic_quantize_matmul,
    "com.microsoft.MatMulBnb4": matmul_bnb4,
    "com.microsoft.MatMulNBits": matmul_nbits,
    "com.microsoft.MoE": in_float32(mixture),
    "com.microsoft.MultiHeadAttention": multi_head_attention,
    "com.microsoft.QAttention": quantized_attention,
    "com.microsoft.QEmbedLayerNormalization": quantized_embeddings,
    "com.microsoft.QMoE": in_float32(quantized_mixture),
    "com.microsoft.QuantizeLinear": standard,
    "com.microsoft.RotaryEmbedding": contrib_rotary,
    "com.microsoft.SimplifiedLayerNormalization": simplified_layer_norm,
    "com.microsoft.SkipSimplifiedLayerNormalization": skip_simplified_layer_norm,
    **{f"ai.onnx.ml.{op}": rule for op, rule in (ROWS | SCORES | SVM | TREES).items()},
    **{f"com.microsoft.{op}": rule for op, rule in CONTRIB.items()},
    **OTHER_TYPES,
    **QLINEAR,
    **RANDOM,
    **SELECTIONS,
    **SEQUENCES,
    **SHAPE_INPUTS,
}


def expand(graph: Graph, node: Node) -> list[Node] | None:
    """What `node` is written as; None if it stays, as it is used here.

    Raises
    ------
    ImportFailed
        Inputs are missing, or attributes of another kind than the operator has: no schema of
        onnxruntime's operators is at hand that would have been checked before.
    UnsupportedModel
        The operator is sound but cannot be compiled as it is.
    """
    op = node.op.rpartition(".")[2]
    try:
        return EXPANSIONS[node.op](graph, node)
    except UnsupportedModel as error:
        if repr(node.name) in str(error):
            raise
        raise UnsupportedModel(f"{op} {node.name!r}: {error}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ImportFailed(
            f"{op} {node.name!r} is malformed, its inputs or attributes do not fit the operator: "
            f"{error}"
        ) from error
