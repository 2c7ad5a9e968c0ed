"""From the normalised graph to Relax: TVM's importer for ONNX operators, ours for ``apq.`` ones.

TVM 0.27's `ONNXGraphImporter` is driven by operator name, so a subclass that answers our names
first and leaves the rest to it reuses its 164 converters. Weights never pass through protobuf.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
import onnx
import tvm
import tvm_ffi
from onnx import helper
from tvm import ir, relax, sym, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from apq_tvm.errors import UnsupportedModel
from apq_tvm.lower.dims import ATTRIBUTE, CONDITIONS, GIVEN, RUN_SIZES, Dims
from apq_tvm.onnx_import.graph import SIZES
from apq_tvm.types import Array, ImportedModel, Node, TensorSpec

Convert = Callable[[relax.BlockBuilder, Node, Sequence[Any]], Any]


def import_graph(
    model: ImportedModel,
    converters: Mapping[str, Convert],
    params: Mapping[str, Array],
    hidden: frozenset[str],
    variables: dict[str, Any],
    dims: Dims,
) -> tvm.IRModule:
    """Build the Relax module of `model`.

    Parameters
    ----------
    model : ImportedModel
    converters : mapping of str to callable
        ``(builder, node, inputs) -> relax.Expr`` (a tuple for several outputs) by operator.
    params : mapping of str to ndarray
        Become parameters of ``main`` after the graph inputs, in this order.
    hidden : frozenset of str
        Weights that only our converters read, in packed form; they reach them as None.
    variables : dict of str to relax.Var
        Filled with the variables of `params` before the first node is converted.
    dims : Dims
        Its symbols are filled likewise with the dimensions of the graph inputs.

    Returns
    -------
    tvm.IRModule
        ``main``, and what the converters added.

    Raises
    ------
    UnsupportedModel
        TVM's importer or a converter refuses a node; the message names it.
    """
    variables.update(
        (name, relax.Var(f"param{i}", relax.TensorType(array.shape, str(array.dtype))))
        for i, (name, array) in enumerate(params.items())
    )
    importer = _Importer(model, converters, hidden, variables, dims)
    with warnings.catch_warnings():
        # The importer warns about every renamed input; names of ours come from the signature.
        warnings.simplefilter("ignore")
        mod = importer.from_onnx(_graph_proto(model), model.opset)
    # The emitted C refuses other inputs by the dimension's name.
    main = mod["main"].with_attr("tir_var_upper_bound", dict(model.limits))
    main = main.with_attr("tir_var_lower_bound", dict(model.least))
    main = main.with_attr(CONDITIONS, [list(condition) for condition in dims.conditions])
    main = main.with_attr(RUN_SIZES, dims.run_sizes).with_attr(GIVEN, dims.given)
    mod["main"] = main.with_attr(ATTRIBUTE, dict(dims.expressions()))
    return mod


def _graph_proto(model: ImportedModel) -> onnx.GraphProto:
    """The nodes and the signature as protobuf, without weights."""
    return helper.make_graph(
        [
            helper.make_node(n.op, n.inputs, n.outputs, name=n.name, **_proto_attrs(n))
            for n in model.nodes
        ],
        model.name,
        [_value_info(spec, model.lengths) for spec in model.inputs],
        [_value_info(spec, {}) for spec in model.outputs] + _tokens(model),
    )


def _tokens(model: ImportedModel) -> list[onnx.ValueInfoProto]:
    """What ``apq.Sizes`` give, as outputs: nothing else may read them, and they must not go."""
    return [
        helper.make_tensor_value_info(node.outputs[0], onnx.TensorProto.INT64, None)
        for node in model.nodes
        if node.op == SIZES
    ]


def _proto_attrs(node: Node) -> dict[str, Any]:
    if node.op.startswith("apq."):
        return {}  # our converters read the Node itself
    return {
        key: onnx.numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        for key, value in node.attrs.items()
    }


def _value_info(spec: TensorSpec, lengths: Mapping[str, str]) -> onnx.ValueInfoProto:
    # TVM computes nothing in bfloat16: its bits are passed on (`apq.FromBfloat16`).
    held = "uint16" if spec.dtype == "bfloat16" else spec.dtype
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(held))
    # TVM's importer reads sums of dimensions.
    shape = [lengths.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape]
    return helper.make_tensor_value_info(spec.name, elem, shape)


class _Importer(ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer, with our operators, and weights taken from the model."""

    def __init__(
        self,
        model: ImportedModel,
        converters: Mapping[str, Convert],
        hidden: frozenset[str],
        variables: Mapping[str, Any],
        dims: Dims,
    ) -> None:
        super().__init__(None, None)
        self._model = model
        self._converters = converters
        self._hidden = hidden
        self._by_name = {node.name: node for node in model.nodes}
        self._variables = variables
        self._dims = dims
        self._branches = any(node.op == "apq.Then" for node in model.nodes)
        self._stand_for: dict[str, set[str]] = {}  # what a dimension was cast from

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        for name, array in self._model.weights.items():
            visible = name not in self._hidden
            if visible and array.dtype.kind not in "fiub":
                raise UnsupportedModel(
                    f"weight {name!r} is of {array.dtype.name}, which no operator but "
                    "DequantizeLinear can read; dequantize it first"
                )
            self._nodes[name] = relax.const(tvm.runtime.tensor(array)) if visible else None

    def _parse_graph_input(self, graph: onnx.GraphProto) -> None:
        super()._parse_graph_input(graph)
        for spec in self._model.inputs:
            for dim, extent in zip(spec.shape, self._nodes[spec.name].ty.shape, strict=True):
                if isinstance(dim, str):
                    self._dims.symbols[dim] = extent
        for name, var in self._variables.items():
            self._inputs[f"param {name}"] = var
        parameter = self._dims.parameter()
        if parameter is not None:
            self._inputs["dims"] = parameter

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """The ONNX import has listed unsupported operators already, all at once."""

    def _convert_operator(
        self, op_name: str, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
    ) -> Any:
        name = attrs["tvm_custom"]["name"]
        convert = self._converters.get(op_name)
        try:
            if convert is not None:
                made = convert(self.bb, self._by_name[name], list(inputs))
            else:
                made = super()._convert_operator(op_name, inputs, attrs, opset)
            made = self._with_known_shapes(self._by_name[name], self.bb.normalize(made))
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(
                f"{op_name} {name!r} cannot be lowered to Relax: {error}"
            ) from error
        return self._bound(made) if self._branches else made

    def _bound(self, made: Any) -> Any:
        """Bind a result here: its first reader may stand behind the branch that makes it, or in the
        second branch, when it would be made between both."""
        if isinstance(made, relax.Tuple):
            return relax.Tuple([self._bound(field) for field in made.fields])
        unbound = isinstance(made, ir.expr.Call | ir.expr.TupleGetItem)
        return self.bb.emit(made) if unbound else made

    def _with_known_shapes(self, node: Node, made: Any) -> Any:
        """Results with the shapes that the ONNX import found, where Relax spells them otherwise.

        The emitted C compares both spellings for the shapes of each run.
        """
        specs = [self._model.value_specs.get(name) for name in node.outputs]
        if isinstance(made.ty, relax.TensorType):
            return self._with_known_shape(node, made, specs[0])
        if not isinstance(made.ty, relax.TupleType) or not any(
            self._differs(kind, spec) for kind, spec in zip(made.ty.fields, specs, strict=False)
        ):
            return made
        parts = [self.bb.emit(relax.TupleGetItem(made, i)) for i in range(len(specs))]
        return relax.Tuple(
            [self._with_known_shape(node, p, s) for p, s in zip(parts, specs, strict=True)]
        )

    def _differs(self, kind: Any, spec: TensorSpec | None) -> list[Any] | None:
        """The shape `kind` should have, if it may have another."""
        if spec is None or not isinstance(kind, relax.TensorType):
            return None
        wanted = self._dims.known(spec.shape)
        if wanted is None or (kind.ndim not in (-1, len(wanted))):
            return None
        if isinstance(kind.shape, relax.ShapeExpr):
            have = list(kind.shape.values)
            if all(tvm_ffi.structural_equal(h, w) for h, w in zip(have, wanted, strict=True)):
                return None
            analyzer = sym.Analyzer()
            if all(analyzer.can_prove_equal(h, w) for h, w in zip(have, wanted, strict=True)):
                return None
        return wanted

    def _with_known_shape(self, node: Node, value: Any, spec: TensorSpec | None) -> Any:
        wanted = self._differs(value.ty, spec)
        if wanted is None:
            return value
        if isinstance(value.ty.shape, relax.ShapeExpr):
            have = value.ty.shape.values
            self._dims.require(have, wanted, node.name)
            if not self._may_stand_for(have, wanted):
                return self.bb.normalize(relax.op.reshape(value, wanted))
        value = value if isinstance(value, relax.Var) else self.bb.emit(value)
        return self.bb.match_cast(value, relax.TensorType(wanted, value.ty.dtype))

    def _may_stand_for(self, have: Sequence[Any], wanted: Sequence[Any]) -> bool:
        """Note what the dimensions of a ``match_cast`` stand for.

        False if one would then be part of that, by way of others maybe: TVM 0.27's
        ``CanonicalizeBindings``, which puts in its place what it stands for, would never end.
        """
        stand_for = dict(self._stand_for)
        for here, there in zip(have, wanted, strict=True):
            if isinstance(there, tirx.Var) and not tvm_ffi.structural_equal(here, there):
                parts = {var.name for var in tirx.analysis.undefined_vars(here, [])}
                stand_for[there.name] = stand_for.get(there.name, set()) | parts
        try:
            TopologicalSorter(stand_for).prepare()
        except CycleError:
            return False
        self._stand_for = stand_for
        return True
