"""C that computes dimensions and bytes: of the inputs, and of data once a run has made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from apq_tvm.codegen.graph.c_text import literal
from apq_tvm.codegen.graph.plain import Buffer, Condition, Graph, Sizes, parenthesised


def symbol_lines(graph: Graph, source: str, sizes: str = "") -> list[str]:
    """Dimensions as variables: those of the inputs, those of data from `sizes`, the others.

    Without `sizes` those of data are 0 as yet, and what follows from them is no constant.
    """
    lines = []
    for i, symbol in enumerate(graph.symbols):
        lines.append(f"  const int64_t {symbol.c_name} = {source}[{i}];")
        lines.append(f"  (void){symbol.c_name};")
    kind = "const int64_t" if sizes else "int64_t"
    for i, name in enumerate(graph.run_sizes):
        lines += [f"  {kind} {name} = {f'{sizes}[{i}]' if sizes else 0};", f"  (void){name};"]
    for name, expression in graph.derived.items():
        own = kind if graph.waits_for(name) else "const int64_t"
        lines += [f"  {own} {name} = {expression};", f"  (void){name};"]
    return lines


def c_dims(dims: Sequence[str]) -> str:
    """A C array of dimensions; a rank of 0 still needs an element."""
    return "{" + ", ".join(dims or ("1",)) + "}"


def _innermost_first(parts: Iterable[str]) -> list[str]:
    return sorted(set(parts), key=lambda text: (len(text), text))


def wide_function(graph: Graph) -> str:
    """Whether every size that the graph computes fits ``int64_t``, part by part."""
    parts = _innermost_first(graph.expressions())
    if not parts and not graph.derived:
        return ""
    functions = ("floordiv", "floormod", "truncdiv", "truncmod", "min", "max")
    symbols = [f"  const apq_wide {s.c_name} = symbols[{i}];" for i, s in enumerate(graph.symbols)]
    derived = []
    for name, text in graph.derived.items():
        inner = _innermost_first(parenthesised(text))
        derived += [f"  if (!apq_fits({part})) return 0;" for part in inner]
        derived += [f"  const apq_wide {name} = {text};", f"  if (!apq_fits({name})) return 0;"]
    return "\n".join(
        [
            *(f"#define apq_{name} apq_wide_{name}" for name in functions),
            "static int sizes_fit(const int64_t *symbols, const int64_t *sizes) {",
            "  (void)symbols, (void)sizes;",
            *symbols,
            *(f"  const apq_wide {n} = sizes[{i}];" for i, n in enumerate(graph.run_sizes)),
            *(f"  (void){name};" for name in graph.run_sizes),
            *(f"  (void){symbol.c_name};" for symbol in graph.symbols),
            *derived,
            *(f"  if (!apq_fits({part})) return 0;" for part in parts),
            "  return 1;",
            "}",
            *(f"#undef apq_{name}" for name in functions),
        ]
    )


def fit_lines(graph: Graph, symbols: str, sizes: str, what: str) -> list[str]:
    """A call of what `_wide_function` wrote, if it wrote anything."""
    if not graph.expressions() and not graph.derived:
        return []
    return [
        f"  if (!sizes_fit({symbols}, {sizes})) return apq_fail(APQ_BAD_INPUT, "
        f'"{what} does not fit 64 bits");'
    ]


def unknown_sizes(graph: Graph) -> list[str]:
    """What is no size yet, as C zeros."""
    count = len(graph.run_sizes)
    return [f"  static const int64_t unknown[{count}] = {{0}};"] if count else []


def condition_line(condition: Condition) -> str:
    """C that refuses a run."""
    message = literal(condition.message)
    return f'  if (!({condition.test})) return apq_fail(APQ_BAD_INPUT, "%s", {message});'


def bytes_line(target: str, name: str, dtype: str, dims: Sequence[str]) -> str:
    """C that counts a tensor's bytes."""
    item = np.dtype(dtype).itemsize
    return (
        f"  if ((rc = apq_bytes({target}, {literal(name)}, {item}, {len(dims)}, "
        f"(const int64_t[]){c_dims(dims)})) != APQ_OK) return rc;"
    )


def sizes_lines(step: Sizes, graph: Graph, source: str) -> list[str]:
    """C that reads sizes from a tensor, once the kernels before have made it."""
    lines = ["  {", f"    const int64_t *const made = (const int64_t *)({source});"]
    given: set[str] = set()
    for i, dim in enumerate(step.dims):
        if dim in step.names and dim not in given:
            given.add(dim)
            slot = f"frame->sizes[{graph.run_sizes.index(dim)}]"
            check = f"apq_check_size({literal(step.layer)}, made[{i}], 0, APQ_LARGEST_DIM)"
            lines += [
                f"    if ((rc = {check}) != APQ_OK) return rc;",
                f"    {dim} = {slot} = made[{i}];",
            ]
    number = graph.sizes.index(step) + 1
    lines += [
        f"    {name} = {text};"
        for name, text in graph.derived.items()
        if graph.waits_for(name) == number
    ]
    for i, dim in enumerate(step.dims):
        if dim not in given:
            check = f"apq_check_size({literal(step.layer)}, made[{i}], {dim}, {dim})"
            lines.append(f"    if ((rc = {check}) != APQ_OK) return rc;")
    return [*lines, f"    if ((rc = late_{number}(frame)) != APQ_OK) return rc;", "  }"]


def late_function(number: int, graph: Graph, buffers: Sequence[Buffer]) -> str:
    """C that checks and allocates what had to wait for the sizes of step `number` of that kind."""
    step = graph.sizes[number - 1]
    mine = [buffer for buffer in buffers if buffer.segment == number]
    lines = [
        f"static int late_{number}(const apq_frame *frame) {{",
        f"  size_t bytes[{max(len(mine), 1)}] = {{0}};",
        "  int rc = APQ_OK;",
        *symbol_lines(graph, "frame->symbols", "frame->sizes"),
        *fit_lines(graph, "frame->symbols", "frame->sizes", "a size computed from data"),
        *(condition_line(condition) for condition in step.conditions),
    ]
    for i, buffer in enumerate(mine):
        lines.append(bytes_line(f"&bytes[{i}]", buffer.name, buffer.dtype, buffer.dims))
    return "\n".join(
        [
            *lines,
            "  if (rc != APQ_OK) return rc;",
            f"  return apq_plan_again(frame, {number}, bytes);",
            "}",
        ]
    )
