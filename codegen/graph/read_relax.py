"""From Relax ``main`` to `apq_tvm.codegen.graph.plain.Graph`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import takewhile
from operator import mul
from typing import Any

import tvm
from numpy.typing import NDArray
from tvm import ir, relax, tirx
from tvm.sym import Analyzer

from apq_tvm.codegen.graph.arrays import Arrays, declared_dtype, known_dtype
from apq_tvm.codegen.graph.bounds import find_accesses
from apq_tvm.codegen.graph.c_expr import c_expr
from apq_tvm.codegen.graph.calls import (
    call_work,
    id_checks,
    least_extents,
    shape_limits,
    symbols_at,
)
from apq_tvm.codegen.graph.check_calls import check_call
from apq_tvm.codegen.graph.late import filled, must_wait
from apq_tvm.codegen.graph.plain import (
    ATTENDING,
    GROWING,
    Array,
    Buffer,
    Call,
    Condition,
    Graph,
    Place,
    Port,
    Precision,
    Sizes,
    Symbol,
    Tensor,
    place_outputs,
)
from apq_tvm.codegen.graph.products import Products
from apq_tvm.codegen.graph.regions import Regions, is_region
from apq_tvm.errors import UnsupportedModel
from apq_tvm.schedules.graph.exprs import collect
from apq_tvm.types import REGION, TensorSpec, Variant

# Attributes of ``main`` that `apq_tvm.lower` sets.
DERIVED, CONDITIONS, RUN_SIZES = "apq.dims", "apq.conditions", "apq.run_sizes"
GIVEN = "apq.given"


def prepare(scheduled: Any, unscheduled: Any) -> Any:
    """Take a scheduled module to the form `read_graph` reads: allocations and kernel calls.

    Parameters
    ----------
    scheduled : tvm.IRModule
        Relax ``main`` of ``call_tir`` and PrimFuncs.
    unscheduled : tvm.IRModule
        The same PrimFuncs before scheduling, in which mere reshapes can still be recognised.

    Returns
    -------
    tvm.IRModule
        Without dataflow blocks; PrimFunc calls write tensors that ``builtin.alloc_tensor`` made.
        Memory planning is left to the runtime, which knows the sizes.
    """
    t = relax.transform
    plain = {v.name_hint: f for v, f in unscheduled.functions.items()}
    functions = {
        v: plain.get(v.name_hint, f) if isinstance(f, tirx.PrimFunc) else f
        for v, f in scheduled.functions.items()
    }
    passes = [t.RewriteDataflowReshape(), t.DeadCodeElimination()]
    mod = tvm.ir.transform.Sequential(passes)(tvm.IRModule(functions))
    mod = tvm.IRModule({**scheduled.functions, mod.get_global_var("main"): mod["main"]})
    passes = [t.ToNonDataflow(), t.RemovePurityChecking(), t.CallTIRRewrite()]
    return tvm.ir.transform.Sequential(passes)(mod)


def read_graph(
    mod: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    params: Mapping[str, Array],
    variants: Mapping[str, tuple[Variant, ...]],
    unscheduled: Any,
) -> Graph:
    """Read a prepared module.

    Parameters
    ----------
    mod : tvm.IRModule
        What `prepare` gave.
    inputs, outputs : sequence of TensorSpec
        The ONNX signature; ``main`` takes the inputs first.
    params : mapping of str to ndarray
        ``main``'s further parameters, in order.
    variants : mapping of str to tuple of Variant
        As in `apq_tvm.types.LoweredModel`.
    unscheduled : tvm.IRModule
        The module before scheduling, in which accesses are checked
        (`apq_tvm.codegen.graph.bounds`).

    Returns
    -------
    Graph

    Raises
    ------
    UnsupportedModel
        Anything left that is not a kernel call, a reshape or a tuple (all of them are named);
        a shape that depends on data; an output that is not a tensor; an unknown dtype.
    """
    return _Reader(mod, params, variants, unscheduled).read(inputs, outputs)


def _c_name(name: str, taken: set[str]) -> str:
    """A C name for a symbol; the prefix keeps it apart from every other name of the source."""
    base = "s_" + re.sub(r"\W", "_", name, flags=re.ASCII)
    unique, n = base, 1
    while unique in taken:
        unique, n = f"{base}_{n}", n + 1
    taken.add(unique)
    return unique


class _Reader:
    """Walks the bindings of ``main`` once; `values` maps Relax variables to what they hold."""

    def __init__(
        self, mod: Any, params: Mapping[str, Array], variants: Mapping[str, Any], unscheduled: Any
    ) -> None:
        self.mod = mod
        self.unscheduled, self.products = unscheduled, Products(unscheduled)
        self.accesses = {
            v.name_hint: find_accesses(f)
            for v, f in unscheduled.functions.items()
            if isinstance(f, tirx.PrimFunc)
        }
        self.main = mod["main"]
        self.params = params
        self.variants = variants
        self.graph = Graph()
        self.arrays = Arrays(self.graph)
        self.names: dict[Any, str] = {}  # symbol → C expression
        self.values: dict[Any, Any] = {}  # Relax variable → Tensor or tuple of values
        self.leftovers: list[str] = []
        self.regions = Regions(self.graph)
        self.late: set[str] = set()  # dimensions that `Sizes` steps give
        self.written: set[int | str] = set()  # buffers that some call has written

    def read(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Graph:
        variables = list(self.main.params)
        derived = dict((self.main.attrs or {}).get(DERIVED, {}))
        self.late = set(map(str, (self.main.attrs or {}).get(RUN_SIZES, ())))
        given = list(map(str, (self.main.attrs or {}).get(GIVEN, ())))
        extents = variables.pop() if derived or self.late or given else None
        if len(variables) != len(inputs) + len(self.params):
            raise UnsupportedModel(
                f"main takes {len(variables)} parameters, but the model has {len(inputs)} inputs "
                f"and {len(self.params)} weights"
            )
        self._read_inputs(variables[: len(inputs)], inputs)
        if extents is not None:
            self._read_given(extents, given)
            self._read_derived(extents, derived)
        conditions = self._read_conditions((self.main.attrs or {}).get(CONDITIONS, ()))
        weights = zip(variables[len(inputs) :], self.params.items(), strict=True)
        for variable, (name, array) in weights:
            self.values[variable] = self.arrays.weight(name, array)
        self._bind_all([b for block in self.main.body.blocks for b in block.bindings])
        if self.leftovers:
            raise UnsupportedModel(
                "these operations have no kernel: " + ", ".join(sorted(set(self.leftovers)))
            )
        self._place_conditions(conditions)
        self._read_outputs(self._value(self.main.body.body), outputs)
        place_outputs(self.graph)
        return self.graph

    # ---- signature ----

    def _read_inputs(self, variables: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
        taken: set[str] = set()
        limits = (self.main.attrs or {}).get("tir_var_upper_bound", {})
        least = (self.main.attrs or {}).get("tir_var_lower_bound", {})
        symbols: list[Symbol] = []
        for number, (variable, spec) in enumerate(zip(variables, specs, strict=True)):
            for axis, dim in enumerate(self._tensor_type(variable, spec.name).shape):
                if isinstance(dim, tirx.Var) and dim not in self.names:
                    self.names[dim] = _c_name(dim.name, taken)
                    shown = spec.shape[axis] if axis < len(spec.shape) else dim.name
                    limit, low = limits.get(dim.name), least.get(dim.name)
                    symbols.append(
                        Symbol(
                            self.names[dim],
                            str(shown),
                            number,
                            axis,
                            None if limit is None else int(limit),
                            None if low is None else int(low),
                        )
                    )
        ports = []
        for number, (variable, spec) in enumerate(zip(variables, specs, strict=True)):
            kind = self._tensor_type(variable, spec.name)
            dims = self._dims(kind.shape)
            dtype = known_dtype(kind.dtype, spec.name)
            self.values[variable] = Tensor(Place.INPUT, number, dtype, dims)
            shown_dims = tuple(
                str(d) for d in (spec.shape if len(spec.shape) == len(dims) else dims)
            )
            shown_type = declared_dtype(dtype, spec)
            ports.append(Port(spec.name, shown_type, dims, shown_dims))
        self.graph.inputs = tuple(ports)
        self.graph.symbols = tuple(symbols)

    def _read_given(self, extents: Any, given: Sequence[str]) -> None:
        """Dimensions that the runtime gives: of no input, but numbered."""
        by_name = {var.name: var for var in extents.ty.values}
        for number, name in enumerate(given):
            self.names[by_name[name]] = _c_name(name, set(self.names.values()))
            symbol = Symbol(self.names[by_name[name]], name, -1, number)
            self.graph.symbols = (*self.graph.symbols, symbol)

    def _read_derived(self, extents: Any, derived: Mapping[str, Any]) -> None:
        """Dimensions that ``main`` gets in a shape parameter: from others, or from data."""
        late = [var for var in extents.ty.values if var.name in self.late]
        for var in late:
            self.names[var] = _c_name(var.name, set(self.names.values()))
        self.graph.run_sizes = tuple(self.names[var] for var in late)
        by_name = {var.name: text for var, text in self.names.items()}
        for var in extents.ty.values:
            if var.name in self.late or var in self.names:
                continue
            expression = derived[var.name]
            names = {v: by_name[v.name] for v in collect(expression, tirx.Var)}
            self.names[var] = _c_name(var.name, set(self.names.values()))
            self.graph.derived[self.names[var]] = c_expr(expression, names)

    def _read_conditions(self, conditions: Iterable[Any]) -> list[Condition]:
        """Extents that must be equal, as the lowering wrote them."""
        by_name = {var.name: text for var, text in self.names.items()}
        seen = set()
        found = []
        for have, want, node in conditions:
            names = {v: by_name[v.name] for e in (have, want) for v in collect(e, tirx.Var)}
            here, there = c_expr(have, names), c_expr(want, names)
            if here != there and (here, there) not in seen:
                seen.add((here, there))
                message = f"these input shapes do not fit together: at {node} two sizes differ"
                found.append(Condition(f"({here}) == ({there})", message))
        return found

    def _place_conditions(self, conditions: Sequence[Condition]) -> None:
        """On every input; those on sizes of a run once they are known."""
        by_step: dict[int, list[Condition]] = {}
        for condition in conditions:
            by_step.setdefault(self.graph.waits_for(condition.test), []).append(condition)
        self.graph.conditions[:0] = by_step.get(0, [])  # their messages name a node
        number = 0
        for at, step in enumerate(self.graph.steps):
            if isinstance(step, Sizes):
                number += 1
                mine = tuple(by_step.get(number, ()))
                self.graph.steps[at] = replace(step, conditions=mine)

    def _tensor_type(self, variable: Any, name: str) -> Any:
        kind = variable.ty
        if not isinstance(kind, relax.TensorType) or kind.shape is None:
            raise UnsupportedModel(f"'{name}' is not a tensor of known rank but {kind}")
        return kind

    def _read_outputs(self, value: Any, specs: Sequence[TensorSpec]) -> None:
        values = value if isinstance(value, tuple) else (value,)
        if self.late:  # behind the outputs stand what `apq.Sizes` gave, which must not go
            values = values[: len(specs)]
        if len(values) != len(specs):
            raise UnsupportedModel(
                f"main returns {len(values)} values, but the model has {len(specs)} outputs"
            )
        ports = []
        for tensor, spec in zip(values, specs, strict=True):
            if not isinstance(tensor, Tensor):
                raise UnsupportedModel(f"output '{spec.name}' is not a tensor (a shape or a tuple)")
            same_rank = len(spec.shape) == len(tensor.dims)
            shown = tuple(str(d) for d in (spec.shape if same_rank else tensor.dims))
            late = any(self.graph.waits_for(dim) for dim in tensor.dims)
            dtype = declared_dtype(tensor.dtype, spec)
            ports.append(Port(spec.name, dtype, tensor.dims, shown, late=late))
        self.graph.outputs = tuple(ports)
        self.graph.results = tuple(values)

    # ---- bindings ----

    def _dims(self, shape: Any) -> tuple[str, ...]:
        return tuple(c_expr(d, self.names) for d in shape)

    def _value(self, expr: Any) -> Any:
        if expr in self.values:
            return self.values[expr]
        if isinstance(expr, ir.expr.GenericConst):
            return self.arrays.constant(_as_numpy(expr))
        if isinstance(expr, ir.expr.Tuple):
            return tuple(self._value(f) for f in expr.fields)
        if isinstance(expr, ir.expr.TupleGetItem):
            value = self._value(expr.tuple_value)
            return value[expr.index] if isinstance(value, tuple) else None
        return None

    def _bind_all(self, bindings: Sequence[Any]) -> None:
        """In their order, but none before the sizes it needs: TVM knows nothing of those."""
        waiting: list[Any] = []
        fills = filled(bindings)
        for binding in bindings:
            known = len(self.graph.sizes)
            for each in [binding, *waiting]:
                if self.late and must_wait(each, waiting, fills, self.graph, self.names):
                    if each is binding:
                        waiting.append(binding)
                else:
                    waiting = [other for other in waiting if other is not each]
                    self._bind(each)
                if len(self.graph.sizes) == known:
                    break  # nothing more is known that others wait for
        for binding in waiting:  # sizes that nothing gives: an error tells
            self._bind(binding)

    def _bind(self, binding: Any) -> None:
        value = binding.value
        if isinstance(binding, relax.MatchCast):
            self._match_cast(binding)
        elif isinstance(value, ir.expr.Call):
            self._call(binding.var, value)
        elif isinstance(value, relax.If):
            self.leftovers.append("If")
        else:
            self.values[binding.var] = self._value(value)

    def _match_cast(self, binding: Any) -> None:
        value = self._value(binding.value)
        wanted = binding.ty
        if not isinstance(value, Tensor) or not isinstance(wanted, relax.TensorType):
            self.leftovers.append("match_cast")
            return
        if wanted.shape is None:
            self.values[binding.var] = value
            return
        dims = list(value.dims)
        for axis, (have, want) in enumerate(zip(value.dims, wanted.shape, strict=True)):
            if isinstance(want, tirx.Var) and want not in self.names:
                self.names[want] = f"({have})"
            elif (text := c_expr(want, self.names)) != have:
                name = binding.var.name
                message = f"these input shapes do not fit: {name} needs {have} to be {text}"
                self.regions.require(Condition(f"({have}) == ({text})", message))
                dims[axis] = text  # what a region gives is told apart by it
        self.values[binding.var] = replace(value, dims=tuple(dims))

    def _call(self, variable: Any, call: Any) -> None:
        if isinstance(call.op, ir.GlobalVar):
            self._kernel_call(call)
            return
        op = str(getattr(call.op, "name", call.op))
        if op == "relax.builtin.alloc_tensor":
            kind = self._tensor_type(variable, variable.name)
            dims = self._dims(call.args[0].values)
            dtype = known_dtype(kind.dtype, variable.name)
            self.values[variable] = Tensor(Place.BUFFER, len(self.graph.buffers), dtype, dims)
            self.graph.buffers.append(Buffer(variable.name, dtype, dims))
        elif op == "relax.reshape" and isinstance(self._value(call.args[0]), Tensor):
            source = self._value(call.args[0])
            dims = self._dims(self._tensor_type(variable, variable.name).shape)
            self._same_size(call.args[0], variable)
            self.values[variable] = Tensor(source.place, source.key, source.dtype, dims)
        elif isinstance(call.op, relax.ExternFunc) and is_region(str(call.op.global_symbol)):
            self._region(str(call.op.global_symbol), call.args)
        else:
            extern = [a for a in call.args if isinstance(a, relax.ExternFunc)]
            target = extern[0] if extern else call.op
            self.leftovers.append(str(getattr(target, "global_symbol", op)))

    def _region(self, name: str, args: Sequence[Any]) -> None:
        """Where a loop or a branch starts or ends: `apq_tvm.lower.regions` says with what."""
        given: list[Tensor | str] = []
        for arg in args:
            value = self._value(arg)
            given.append(value if isinstance(value, Tensor) else c_expr(arg, self.names))
        kind, _, layer = name.removeprefix(REGION).partition("/")
        if kind == "sizes":
            self._sizes(layer, given, args)
            return
        touched = (v for v in given if isinstance(v, Tensor) and v.place is Place.BUFFER)
        self.written.update(tensor.key for tensor in touched)
        renamed = self.regions.read(name, given)
        for arg, value in zip(args, renamed, strict=True):
            if value is not None:
                self.values[arg] = value

    def _sizes(self, layer: str, given: Sequence[Tensor | str], args: Sequence[Any]) -> None:
        """Entries of the first of `given` become the dimensions between it and the last."""
        source = given[0]
        dims = tuple(dim for dim in given[1:-1] if isinstance(dim, str))
        assert isinstance(source, Tensor)
        known = {name for step in self.graph.sizes for name in step.names}
        fresh = [d for d in dict.fromkeys(dims) if d in self.graph.run_sizes and d not in known]
        self.graph.steps.append(Sizes(source, dims, tuple(fresh), layer))
        self.values[args[-1]] = source

    def _same_size(self, source: Any, target: Any) -> None:
        """A reshaped tensor has as many elements: a condition where nothing proves that."""
        shapes = [list(value.ty.shape) for value in (source, target)]
        sizes = [reduce(mul, shape, tirx.const(1, "int64")) for shape in shapes]
        if Analyzer().can_prove_equal(*sizes):
            return
        old, new = (c_expr(Analyzer().simplify(size), self.names) for size in sizes)
        message = f"these input shapes do not fit together: {old} elements are reshaped to {new}"
        self.regions.require(Condition(f"({old}) == ({new})", message))

    def _kernel_call(self, call: Any) -> None:
        name = call.op.name_hint
        func = self.mod[name] if call.op in self.mod.functions else None
        choices = tuple(self.variants.get(name, ()))
        wanted = [choice.func for choice in choices if choice.func]
        missing = [name for name in wanted if name not in _function_names(self.mod)]
        if func is None or missing:
            raise UnsupportedModel(f"kernel {name} or one of {missing} is not in the module")
        args: list[Tensor | str] = []
        for arg in call.args:
            value = self._value(arg)
            if isinstance(value, Tensor):
                args.append(value)
            elif value is not None:
                raise UnsupportedModel(f"kernel {name}: argument {arg} is a tuple")
            else:
                args.append(c_expr(arg, self.names))
        tensors = [a for a in args if isinstance(a, Tensor)]
        # Of a linear layer the result has M rows, whatever its activations were made to.
        op = str(func.attrs["apq.op"]) if func.attrs and "apq.op" in func.attrs else ""
        of = tensors[-1 if op in ("linear", "dispatch") else 0] if tensors else None
        rows = of.dims[0] if of is not None and of.dims else "1"
        written = [a.key for a in args if isinstance(a, Tensor) and a.place is Place.BUFFER]
        result = self.graph.buffers[int(written[-1])].name if written else ""
        outputs = len(list(takewhile(lambda key: key not in self.written, reversed(written))))
        self.written.update(written)
        reaches, lookups = self.accesses.get(name, ((), ()))
        names = symbols_at(self.unscheduled[name], args) if reaches else {}
        self._limit(*shape_limits(name, reaches, names))
        self._limit({}, least_extents(func, name, args))
        checks = id_checks(func, name, lookups, args)
        run, taken = func, args
        for choice in reversed(choices):
            if choice.func:
                run = self.mod[choice.func]
                taken = [args[i] for i in choice.args] if choice.args is not None else args
                check_call(choice.func, run, taken)
        if not choices:
            check_call(name, func, args)
        self.graph.steps.append(
            Call(
                kernel=name,
                variants=choices,
                rows=rows,
                args=tuple(args),
                work=call_work(run, taken, symbols_at(run, taken), bool(checks)),
                id_checks=checks,
                comment=f"{result} = {name}",
                precision=self._precision(choices, args),
                outputs=outputs,
                grows=op in GROWING,
                attends=op in ATTENDING,
                products=self.products.of(name, args),
            )
        )

    def _precision(self, choices: Sequence[Variant], args: Sequence[Tensor | str]) -> int:
        """Number of the layer's run-time precision, -1 if it has none."""
        widths = [choice.width for choice in choices if choice.width]
        if not widths:
            return -1
        # Weight parameters are called {layer}.{array} (`apq_tvm.lower`).
        weights = (a for a in args if isinstance(a, Tensor) and a.place is Place.WEIGHT)
        layer = str(next(weights).key).rpartition(".")[0]
        mine = Precision(layer, min(widths), max(widths))
        if mine not in self.graph.precisions:
            self.graph.precisions.append(mine)
        return self.graph.precisions.index(mine)

    def _limit(self, limits: Mapping[str, int], conditions: Sequence[Condition]) -> None:
        """Take note of what a kernel asks of the input shapes."""
        for dimension, limit in limits.items():
            symbol = next((s for s in self.graph.symbols if s.c_name == dimension), None)
            if symbol is not None and not self.regions.branching:
                symbol.limit = limit if symbol.limit is None else min(limit, symbol.limit)
            else:
                message = f"these input shapes are too large: {dimension} must be at most {limit}"
                self.regions.require(Condition(f"{dimension} <= {limit}", message))
        for condition in conditions:
            self.regions.require(condition)


def _function_names(mod: Any) -> set[str]:
    return {v.name_hint for v in mod.get_global_vars()}


def _as_numpy(constant: Any) -> NDArray[Any]:
    array: NDArray[Any] = constant.value.numpy()
    return array
