"""From `apq_tvm.codegen.graph.plain.Graph` to the C source of a module's graph.

The source holds the module table, ``shapes`` (every dimension and buffer size from the symbols),
``graph`` (the calls in order) and nothing else; what they call is in ``runtime/``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from apq_tvm.codegen.graph.c_sizes import (
    bytes_line,
    c_dims,
    condition_line,
    fit_lines,
    late_function,
    sizes_lines,
    symbol_lines,
    unknown_sizes,
    wide_function,
)
from apq_tvm.codegen.graph.c_text import comment, identifier, literal
from apq_tvm.codegen.graph.plain import (
    Array,
    Buffer,
    Call,
    Condition,
    Copy,
    Graph,
    Place,
    Port,
    Region,
    Sizes,
    Step,
    Symbol,
    Tensor,
)
from apq_tvm.codegen.graph.session import left_out, session_table
from apq_tvm.codegen.graph.stages import stage_lines, stage_table
from apq_tvm.types import Variant

DL_CODES = {"bool": 6, "int": 0, "uint": 1, "float": 2}


@dataclass(frozen=True)
class WeightsFile:
    """What the module table must know of the weights file: see `apq_tvm.codegen.package.weights`.

    `offsets` are from the start of the file, by weight name.
    """

    offsets: Mapping[str, int]
    header_bytes: int
    file_bytes: int
    header_checksum: int
    data_checksum: int


def dl_dtype(dtype: str) -> str:
    """Write a numpy dtype as a ``DLDataType`` initializer."""
    if dtype == "bfloat16":
        return "{4, 16, 1}"
    bits = np.dtype(dtype).itemsize * 8
    return f"{{{DL_CODES[np.dtype(dtype).name.rstrip('0123456789')]}, {bits}, 1}}"


@dataclass(frozen=True)
class Device:
    """What the C source of a graph says of the device it is for.

    Parameters
    ----------
    target : str
        The profile's name.
    cpu_flags : tuple of str
        What the machine must have, as ``/proc/cpuinfo`` spells it.
    number : int
        Of the device among those that the library is for, the most preferred first.
    prefix : str
        What its kernels' symbols start with, to tell them from those of the other devices.
    near_bytes : int
        Working memory of a thread above which runs are cut into parts along `Graph.batch`.
    runtime : str
        Folder of ``codegen/runtime`` whose files its runs need beside those of ``common``.
    """

    target: str
    cpu_flags: tuple[str, ...] = ()
    number: int = 0
    prefix: str = ""
    near_bytes: int = 0
    runtime: str = "cpu"

    @property
    def code(self) -> str:
        """C name of what a GPU loads (`apq_tvm.codegen.cuda.tables`); ``""`` for processors."""
        return f"apq_code_{self.number}" if self.runtime == "cuda" else ""

    @property
    def table(self) -> str:
        """C name of the module table."""
        return f"apq_table_{self.number}"


def tables_source(devices: Sequence[Device]) -> str:
    """Write the C array of all module tables, for ``api.c``."""
    names = [device.table for device in devices]
    pointers = ", ".join(f"&{name}" for name in names)
    return (
        f"extern const apq_module {', '.join(names)};\n"
        f"static const apq_module *const apq_tables[] = {{{pointers}, NULL}};"
    )


def graph_source(
    name: str, version: str, graph: Graph, weights: WeightsFile, device: Device
) -> str:
    """Write the C source of a module's graph on one device.

    Parameters
    ----------
    name : str
        The module's name, a C identifier.
    version : str
        The module format's version.
    graph : Graph
    weights : WeightsFile
    device : Device

    Returns
    -------
    str
        C11, to be compiled with ``runtime/`` on the include path.
    """
    buffers = [b for b in graph.buffers if b.first >= 0 and b.output is None]
    buffers.sort(key=lambda buffer: buffer.segment)  # those of a segment lie side by side
    numbers = {id(b): i for i, b in enumerate(buffers)}
    parts = [
        f"/* The graph of {identifier(name)} on {comment(device.target)}, emitted by apq_tvm. */",
        '#include <string.h>\n\n#include "apq_runtime.h"',
        _kernel_declarations(graph, device.prefix),
        _constants(graph.constants),
        wide_function(graph),
        _shapes_function(graph, numbers),
        *(late_function(number, graph, buffers) for number in range(1, len(graph.sizes) + 1)),
        _graph_function(graph, _Pointers(graph, weights, numbers), device.prefix),
        _tables(graph, buffers, device.cpu_flags),
        _module_table(name, version, graph, weights, device, buffers),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _kernel_declarations(graph: Graph, prefix: str) -> str:
    return "\n".join(
        f"int {_symbol(prefix, k)}(void *self, const apq_any *args, int32_t n, apq_any *result);"
        for k in graph.kernels()
    )


def _symbol(prefix: str, kernel: str) -> str:
    return f"__tvm_ffi_{identifier(prefix + kernel)}"


def _constants(constants: Mapping[str, Array]) -> str:
    lines = []
    for name, array in constants.items():
        data = array.tobytes() or b"\0"
        text = ", ".join(str(b) for b in data)
        lines.append(
            f"/* {array.dtype}{list(array.shape)} */\n"
            f"static _Alignas(APQ_ALIGNMENT) unsigned char {name}[] = {{{text}}};"
        )
    return "\n".join(lines)


def _shapes_function(graph: Graph, numbers: Mapping[int, int]) -> str:
    lines = [
        "static int shapes(const int64_t *symbols, int64_t *inputs, int64_t *outputs,",
        "                  size_t *bytes) {",
        "  size_t unused;",
        "  int rc = APQ_OK;",
        "  (void)symbols, (void)inputs, (void)outputs, (void)bytes;",
        *unknown_sizes(graph),
        *symbol_lines(graph, "symbols", "unknown"),
    ]
    for symbol in graph.symbols:
        if symbol.limit is not None:
            lines.append(
                f"  if ({symbol.c_name} > {symbol.limit}) return apq_fail(APQ_BAD_INPUT, "
                f'"%s is %lld, this model allows at most {symbol.limit}", {literal(symbol.name)}, '
                f"(long long){symbol.c_name});"
            )
        if symbol.least is not None:
            lines.append(
                f"  if ({symbol.c_name} < {symbol.least}) return apq_fail(APQ_BAD_INPUT, "
                f'"%s is %lld, this model needs at least {symbol.least}{_remedy(symbol)}", '
                f"{literal(symbol.name)}, "
                f"(long long){symbol.c_name});"
            )
    unknown = "unknown" if graph.run_sizes else "NULL"
    large = "these input shapes are too large: a size computed from them"
    lines += fit_lines(graph, "symbols", unknown, large)
    lines += [condition_line(condition) for condition in graph.conditions]
    for array, ports in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        dims = ["-1" if graph.waits_for(d) else d for p in ports for d in p.dims]
        lines += [f"  {array}[{i}] = {d};" for i, d in enumerate(dims)]
    for port in graph.outputs:
        if not port.late:
            lines.append(bytes_line("&unused", port.name, port.dtype, port.dims))
    for buffer in graph.buffers:
        if id(buffer) in numbers:
            target = f"&bytes[{numbers[id(buffer)]}]"
            if buffer.segment:
                lines.append(f"  {target[1:]} = 0;")
            else:
                lines.append(bytes_line(target, buffer.name, buffer.dtype, buffer.dims))
    return "\n".join([*lines, "  return rc;", "}"])


def _remedy(symbol: Symbol) -> str:
    """What lets a dimension be 0 where the import took it to be more."""
    return "; compile it with a least size of 0 (--dim NAME=0:MOST)" if symbol.least == 1 else ""


class _Pointers:
    """Where a tensor's bytes are, as a C expression inside ``graph``."""

    def __init__(self, graph: Graph, weights: WeightsFile, numbers: Mapping[int, int]) -> None:
        self.graph = graph
        self.weights = weights
        self.numbers = numbers

    def of(self, tensor: Tensor) -> str:
        if tensor.place is Place.INPUT:
            return f"frame->inputs[{tensor.key}]"
        # A GPU reads constants where its weights lie.
        offset = self.weights.offsets.get(str(tensor.key))
        if tensor.place is Place.WEIGHT or (tensor.place is Place.CONSTANT and offset is not None):
            return f"frame->weights + {offset}u"
        if tensor.place is Place.CONSTANT:
            return str(tensor.key)
        buffer = self.graph.buffers[int(tensor.key)]
        if buffer.output is not None:
            return f"frame->outputs[{buffer.output}]"
        return f"frame->buffers[{self.numbers[id(buffer)]}]"

    def label(self, tensor: Tensor) -> str:
        if tensor.place is Place.INPUT:
            return self.graph.inputs[int(tensor.key)].name
        if tensor.place is Place.BUFFER:
            return self.graph.buffers[int(tensor.key)].name
        return str(tensor.key)


def _graph_function(graph: Graph, pointers: _Pointers, prefix: str) -> str:
    lines = [
        "static int graph(const apq_frame *frame) {",
        "  int rc = APQ_OK;",
        "  (void)frame;",
        *symbol_lines(graph, "frame->symbols"),
    ]
    skipped = left_out(graph)
    for number, step in enumerate(graph.steps):
        lines += stage_lines(graph.stages, number)
        step_lines = _step_lines(number, step, pointers, prefix)
        if number in skipped:
            wanted = f"  if (frame->outputs[{skipped[number]}] != NULL) {{"
            step_lines = [wanted, *step_lines, "  }"]
        lines += step_lines
    late = [i for i, port in enumerate(graph.outputs) if port.late]
    for i in late:
        result = graph.results[i]
        lines.append(f"  frame->results[{i}] = {pointers.of(result)};")
        first = sum(len(port.dims) for port in graph.outputs[:i])
        lines += [f"  frame->result_dims[{first + j}] = {d};" for j, d in enumerate(result.dims)]
    copies = [_copy_line(i, graph, pointers) for i in range(len(graph.results)) if i not in late]
    if any(copies):
        lines.append("  /* Outputs that are inputs, constants or another output. */")
    lines += [c for c in copies if c]
    lines += ["  }"][: len(graph.stages)]
    return "\n".join([*lines, "  return rc;", "}"])


def _step_lines(number: int, step: Step, pointers: _Pointers, prefix: str) -> list[str]:
    if isinstance(step, Call):
        return _call_lines(number, step, pointers, prefix)
    if isinstance(step, Copy):
        return [_row_copy(step, pointers)]
    if isinstance(step, Condition):
        return [condition_line(step)]
    if isinstance(step, Sizes):
        return sizes_lines(step, pointers.graph, pointers.of(step.source))
    return _region_lines(step, pointers)


def _region_lines(step: Region, pointers: _Pointers) -> list[str]:
    flag = "" if step.condition is None else f"*(const uint8_t *)({pointers.of(step.condition)})"
    if step.kind == "loop":
        i = f"i{step.number}"
        trip = step.trip
        if isinstance(trip, Tensor):
            trip = f"*(const int64_t *)({pointers.of(trip)})"
        test = f"{i} < ({trip})" + (f" && {flag}" if flag else "")
        lines = [f"  for (int64_t {i} = 0; {test}; {i}++) {{"]
        if step.counter is not None:
            call = f"apq_set_round(frame, {pointers.of(step.counter)}, {i})"
            lines.append(f"  if ((rc = {call}) != APQ_OK) return rc;")
        return lines
    return {"then": [f"  if ({flag}) {{"], "else": ["  } else {"]}.get(step.kind, ["  }"])


def _row_copy(step: Copy, pointers: _Pointers) -> str:
    sizes = [f"(size_t){step.target.itemsize}", *(f"(size_t)({d})" for d in step.target.dims)]
    size = " * ".join(sizes)

    def at(tensor: Tensor, row: str) -> str:
        start = pointers.of(tensor)
        return f"(unsigned char *)({start}) + (size_t)({row}) * {size}" if row else start

    target, source = at(step.target, step.target_row), at(step.source, step.source_row)
    return _copy(target, source, size)


def _copy(target: str, source: str, size: str) -> str:
    return f"  if ((rc = apq_copy(frame, {target}, {source}, {size})) != APQ_OK) return rc;"


def _call_lines(number: int, call: Call, pointers: _Pointers, prefix: str) -> list[str]:
    tensors = [a for a in call.args if isinstance(a, Tensor)]
    shown = ", ".join(a if isinstance(a, str) else comment(pointers.label(a)) for a in call.args)
    lines = [f"  /* {number}: {comment(call.comment)}({shown}) */", "  {"]
    lines += [f"    const int64_t d{i}[] = {c_dims(t.dims)};" for i, t in enumerate(tensors)]
    if tensors:
        lines.append("    DLTensor t[] = {")
        for i, t in enumerate(tensors):
            dtype = f"(DLDataType){dl_dtype(t.dtype)}"
            lines.append(f"        apq_tensor({pointers.of(t)}, {dtype}, {len(t.dims)}, d{i}),")
        lines.append("    };")
    args, next_tensor, argument_of = [], 0, {}
    for position, arg in enumerate(call.args):
        if isinstance(arg, str):
            args.append(f"apq_int({arg})")
        else:
            args.append(f"apq_arg(&t[{next_tensor}])")
            argument_of[position] = next_tensor
            next_tensor += 1
    lines.append(f"    const apq_any a[] = {{{', '.join(args)}}};")
    for check in call.id_checks:
        ids = f"&t[{argument_of[check.arg]}]"
        lines.append(
            f"    if ((rc = apq_check_ids(frame, {literal(check.layer)}, {ids}, {check.column}, "
            f"{check.columns}, {check.lowest}, {check.rows})) != APQ_OK) return rc;"
        )
    written = tensors[len(tensors) - call.outputs :]
    empty = [_nothing(tensor) for tensor in written]
    guard = f"    if (!({' && '.join(empty)})) {{" if all(empty) and empty else "    {"
    unseen = _nothing(tensors[1]) if call.attends else ""
    if unseen:
        lines += [f"    if {unseen} {{", *(_clear_line(y, pointers) for y in written), "    }"]
        guard = f"    else {guard.strip()}"
    lines += [guard, *_launch_lines(call, len(args), prefix), "    }"]
    return [*lines, "    if (rc != APQ_OK) return rc;", "  }"]


def _clear_line(tensor: Tensor, pointers: _Pointers) -> str:
    sizes = (str(tensor.itemsize), *tensor.dims)
    size = " * ".join(f"(size_t)({dim})" for dim in sizes)
    return f"    if (rc == APQ_OK) rc = apq_clear(frame, {pointers.of(tensor)}, {size});"


def _nothing(tensor: Tensor) -> str:
    """C condition: the tensor has no elements; empty where it always has some."""
    free = [dim for dim in tensor.dims if not dim.isdecimal() or int(dim) == 0]
    return "(" + " || ".join(f"({dim}) == 0" for dim in free) + ")" if free else ""


def _launch_lines(call: Call, count: int, prefix: str) -> list[str]:
    lines = [f"    const double work = {call.work}, products = (double)({call.products});"]
    if not call.variants:
        return [*lines, f"    {_launch(prefix, call.kernel, 'a', count)}"]
    lines.append(f"    const int64_t rows = {call.rows};")
    widths = sorted({variant.width for variant in call.variants})
    if call.precision >= 0:
        lines.append(f"    const int32_t bits = frame->bits[{call.precision}];")
    for i, width in enumerate(widths):
        mine = _variant_lines([v for v in call.variants if v.width == width], count, prefix)
        if len(widths) == 1:
            lines += mine
        else:
            test = f"if (bits == {width}) " if i < len(widths) - 1 else ""
            lines += [f"    {'else ' if i else ''}{test}{{", *mine, "    }"]
    return [*lines, "    (void)rows;"]


def _variant_lines(variants: Sequence[Variant], count: int, prefix: str) -> list[str]:
    """One launch by the rows at hand."""
    lines = []
    for i, variant in enumerate(variants):
        if not variant.func:
            launch = "{ }"
        elif variant.args is None:
            launch = _launch(prefix, variant.func, "a", count)
        else:
            taken = ", ".join(f"a[{arg}]" for arg in variant.args)
            own = f"const apq_any own[] = {{{taken}}};"
            launch = f"{{ {own} {_launch(prefix, variant.func, 'own', len(variant.args))} }}"
        test = f"if (rows <= {variant.m_max}) " if i < len(variants) - 1 else ""
        lines.append(f"    {'else ' if i else ''}{test}{launch}")
    return lines


def _launch(prefix: str, kernel: str, args: str, count: int) -> str:
    function = _symbol(prefix, kernel)
    return f"rc = apq_call(frame, {literal(kernel)}, {function}, {args}, {count}, work, products);"


def _copy_line(index: int, graph: Graph, pointers: _Pointers) -> str:
    result = graph.results[index]
    if result.place is Place.BUFFER and graph.buffers[int(result.key)].output == index:
        return ""
    size = " * ".join([f"(size_t){result.itemsize}", *(f"(size_t)({d})" for d in result.dims)])
    return _copy(f"frame->outputs[{index}]", pointers.of(result), size)


def _port_table(name: str, ports: Sequence[Port]) -> list[str]:
    lines = []
    for i, port in enumerate(ports):
        shown = ", ".join([*(literal(d) for d in port.shown), "NULL"])
        lines.append(f"static const char *const {name}_dims_{i}[] = {{{shown}}};")
    lines.append(f"static const apq_value {name}[] = {{")
    for i, port in enumerate(ports):
        dtype = dl_dtype(port.dtype)
        flags = f"{int(port.late)}, {int(port.cut)}"
        rest = f"{len(port.dims)}, {name}_dims_{i}, {flags}"
        lines.append(f"    {{{literal(port.name)}, {dtype}, {rest}}},")
    lines += ["    {NULL, {0, 0, 0}, 0, NULL, -1, 0, 0},", "};"]
    return lines


def _tables(graph: Graph, buffers: Sequence[Buffer], cpu_flags: Sequence[str]) -> str:
    flags = ", ".join([*(literal(f) for f in cpu_flags), "NULL"])
    lifetimes = [(buffer.first, buffer.last) for buffer in buffers]
    spans = ", ".join(f"{{{first}, {last}}}" for first, last in [*lifetimes, (0, 0)])
    segments = [buffer.segment for buffer in buffers]
    starts = [bisect_left(segments, number) for number in range(len(graph.sizes) + 2)]
    symbols = [f"    {{{literal(s.name)}, {s.input}, {s.axis}}}," for s in graph.symbols]
    precisions = [f"    {{{literal(p.layer)}, {p.least}, {p.most}}}," for p in graph.precisions]
    return "\n".join(
        [
            *_port_table("input_table", graph.inputs),
            *_port_table("output_table", graph.outputs),
            "static const apq_symbol symbol_table[] = {",
            *symbols,
            "    {NULL, 0, 0},",
            "};",
            "static const apq_precision precision_table[] = {",
            *precisions,
            "    {NULL, 0, 0},",
            "};",
            f"static const apq_lifetime lifetime_table[] = {{{spans}}};",
            f"static const int32_t segment_table[] = {{{', '.join(map(str, starts))}}};",
            f"static const char *const flag_table[] = {{{flags}}};",
            *filter(None, [session_table(graph, buffers)]),
            stage_table(graph.stages),
        ]
    )


def _module_table(
    name: str,
    version: str,
    graph: Graph,
    weights: WeightsFile,
    device: Device,
    buffers: Sequence[Buffer],
) -> str:
    fields = {
        "name": literal(name),
        "version": literal(version),
        "target": literal(device.target),
        "num_inputs": len(graph.inputs),
        "num_outputs": len(graph.outputs),
        "num_symbols": len(graph.symbols),
        "num_buffers": len(buffers),
        "num_sizes": len(graph.run_sizes),
        "num_segments": len(graph.sizes) + 1,
        "num_precisions": len(graph.precisions),
        "input_dims": sum(len(p.dims) for p in graph.inputs),
        "output_dims": sum(len(p.dims) for p in graph.outputs),
        "inputs": "input_table",
        "outputs": "output_table",
        "symbols": "symbol_table",
        "lifetimes": "lifetime_table",
        "segments": "segment_table",
        "batch": graph.batch,
        "near_bytes": f"{device.near_bytes}u",
        "num_stages": max(1, len(graph.stages)),
        "stages": "stage_table",
        "cpu_flags": "flag_table",
        "precisions": "precision_table",
        "header_bytes": f"{weights.header_bytes}u",
        "file_bytes": f"{weights.file_bytes}u",
        "header_checksum": f"{weights.header_checksum:#018x}u",
        "data_checksum": f"{weights.data_checksum:#018x}u",
        "shapes": "shapes",
        "graph": "graph",
        "kept": "&kept_table" if graph.kept else "NULL",
        "code": f"&{device.code}" if device.code else "NULL",
    }
    rows = [f"    .{field} = {value}," for field, value in fields.items()]
    code = f"extern const struct apq_device_code {device.code};"
    return "\n".join(
        [
            *([code] if device.code else []),
            f"extern const apq_module {device.table};",
            f"const apq_module {device.table} = {{",
            *rows,
            "};",
        ]
    )
