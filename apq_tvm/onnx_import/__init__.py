"""An ONNX file becomes a normalised graph: ``import_onnx(path) -> ImportedModel``.

Nodes keep ONNX semantics at the model's opset, except the ``apq.`` operators. Dimensions in their
attributes are ints or text over the names in the input specs (``"2 * batch + 1"``; read with
`apq_tvm.onnx_import.symbolic.dims.evaluate`). An absent optional input is ``""``, or missing at the
end.

==================================  ==========================================================
``apq.Linear(x, w, bias, res)``     ``activation``: y = act(x · wᵀ + bias) + res; w float32 [N, K];
                                    ``after``: the activation comes last
``apq.Windows(x)``                  rows of a convolution: of an image [N, *sizes, C] the windows
                                    [N, *out, taps · count], taps first; ``kernel``, ``strides``,
                                    ``dilations``, ``begins``, ``ends`` (padding with zeros) or
                                    ``auto`` (SAME_UPPER, SAME_LOWER), ``shape``, ``channels``
                                    (first, count)
``apq.Depthwise(x, w, bias)``       the windows of each channel times w [taps, C]; ``activation``;
                                    of a group of so many channels, where there are ``inputs``:
                                    w [taps · inputs, outputs of all groups]
``apq.Pool(x)``                     ``kind`` max or average, ``padding``: whether a mean counts it
``apq.Fold(z, bias)``               windows [N, *sizes, taps · C] added up where they overlap
``apq.Resize(x)``                   ``mode``, ``coordinates``, ``rounding``, ``scales``, ``shape``
``apq.Activation(x)``               ``activation`` by name
``apq.Product(a, b)``               a · b, rounded before anything is added to it
``apq.Embedding(w, ids)``           rows of w float32 [V, D]; negative ids count from the end;
                                    ``keep``: why the table stays float
``apq.MatMul(a, b)``                ``perm_a``, ``perm_b``, ``perm_out``: transpose(transpose(a)
                                    @ transpose(b))
``apq.Trees(x, ...)``               a forest of `apq_tvm.ops.graph.trees`; ``targets``, ``how``,
                                    ``modes``, ``missing``, ``least``, ``side``
``apq.Softmax(x, mask)``            ``scale``: softmax(x * scale + mask) over the last axis;
                                    ``zero_masked``: rows of -inf alone give 0, not NaN
``apq.Gelu(x)``                     ``approximate``: ``"none"`` or ``"tanh"``
``apq.AppendCache(past, new, at)``  ``shape`` [B, N, T, H]: past[b, :, j] for j < at[b], then
                                    new[b, j - at[b]] ([B, S, N, H]), then 0; past may be absent
``apq.FromBfloat16(x)``             a graph input as float32; ``apq.ToBfloat16(x)`` the reverse: no
                                    other value is bfloat16
``apq.MaxPoolIndices(x)``           MaxPool with both outputs: values and their places
``apq.Sample(x, places)``           x [N, C, H, W] between its pixels, linear, 0 outside: places
                                    [N, H', W', 2] are x and y, in pixels from the first's middle
``apq.Reshape(x)``                  ``shape``: where a constant target with 0 and -1 cannot say it
``apq.Expand(x)``                   ``shape``: of the output, broadcasting done
``apq.Slice(x)``                    ``axes``, ``starts``, ``steps`` (not 0), ``shape`` of the
                                    output; starts are counted from the front and in range
``apq.Assume(x)``                   ``shape``: what x must have, checked at run time
``apq.AssumeHere(x)``               likewise, checked only where a branch comes by
``apq.PoolFirst(x)``                windows of ``kernel``, ``strides``, ``dilations`` over x [N, C,
                                    ...] padded by ``begins``, ``ends``; ``kind`` "max", "average"
                                    (``padding``, ``ceil``) or "lp" (``p``); ``shape``
``apq.Pad(x, value)``               ``mode``, ``before`` (per axis, negative cuts off), ``shape``
``apq.ResizeAxes(x, scales)``       ``axes``, ``scales`` (0.0: output by input size), ``roi``, and
                                    ONNX's ``mode`` and so on; ``shape``; where there is a second
                                    input ``told`` says which of it are the scales
``apq.Full()``                      ``shape``, ``value`` (0-d array), ``dtype``
``apq.Range()``                     ``shape`` (one entry), ``start``, ``delta``, ``dtype``
``apq.Dims()``                      ``dims`` as a tensor of ``shape`` (ints, rank 0 or 1) and
                                    ``dtype``: dimensions used as numbers
``apq.Sizes(v)``                    v int64; its entries are ``dims`` from here on: symbols
                                    ``run0``, ``run1``, ... that nothing else gives, or what an
                                    entry must be
``apq.Numbers()``                   sizes by a ``rule`` of `apq_tvm.ops.graph.numbers` out of
                                    tensors and ``extents``
``apq.NonZero(x)``                  x bool; ``shape`` [rank, count]
``apq.Unique(x)``                   rows of x [n, inner]: first [n], inverse [n], times [n],
                                    count [1]; ``sorted``, ``shapes``, ``dtypes``
``apq.NonMaxSuppression(b, s, ..)`` rows [most, 3], count [1]; ``center``, ``shapes``, ``dtypes``
``apq.TopK(x)``                     ``axis``, ``largest``, ``shapes``, ``dtypes``; ``apq.OneHot(x,
                                    values)``, ``apq.Tile(x)``: ``shape``; of symbolic sizes, and
                                    every Tile
==================================  ==========================================================

Loops and branches are flat too: `apq_tvm.onnx_import.symbolic.regions` describes the operators at
their starts and ends.

``LayerNormalization`` and ``RMSNormalization`` may stand in graphs of an older opset than theirs.
Images of the ``apq.`` operators have their channels last (`apq_tvm.onnx_import.conv`).
A weight that came quantized is float here too; `ImportedModel.quantized` has its codes
(`apq_tvm.onnx_import.integers.codes`). ``tests/onnx_reference.py`` is the meaning of all of this in
numpy. Importing this package does not import onnx.
"""

from __future__ import annotations

from pathlib import Path

from apq_tvm.errors import ApqError, ImportFailed
from apq_tvm.types import AnyPath, DimSizes, ImportedModel

__all__ = ["import_onnx"]


def import_onnx(
    path: AnyPath, dims: DimSizes | None = None, as_written: bool = False
) -> ImportedModel:
    """Read an ONNX model and normalise it.

    Parameters
    ----------
    path : str or path
        An ONNX file of opset 11 or later; external data must lie beside it.
    dims : mapping of str to int or (int, int), optional
        Sizes of symbolic dimensions, or the least and greatest they may have, by ONNX name.
    as_written : bool
        Activations that the file rounds to integers while it runs are rounded, as it says. By
        default they are not: a scheme rounds them.

    Returns
    -------
    ImportedModel
        Constants folded, shapes resolved, every quantizable layer one named ``apq.Linear`` or
        ``apq.Embedding``; see the package docstring.

    Raises
    ------
    ImportFailed
        The file is missing, not ONNX, truncated, unsafe, cyclic or contradicts itself.
    BadInput
        No input has a dimension of `dims`.
    UnsupportedModel
        The file is sound but holds what cannot be compiled; everything of a kind is listed at once.
    """
    from apq_tvm.onnx_import.normalise import import_model

    try:
        return import_model(Path(path), dims or {}, as_written)
    except ApqError:
        raise
    except Exception as error:  # of onnx's C++ too, whose errors have no base of their own
        raise ImportFailed(
            f"{str(path)!r} contradicts itself ({type(error).__name__}: {error}); if ONNX Runtime "
            "runs it, please report it"
        ) from error
