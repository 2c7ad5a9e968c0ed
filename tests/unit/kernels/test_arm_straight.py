"""Registers and order of straight assembly: what a program computes stays the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apq_tvm.tensorize.arm.written.straight import Straight, Value, together

Step = tuple[int, int, int]


def program(steps: list[Step]) -> tuple[Straight, list[str]]:
    """Some instructions, each of earlier values, and what the last ones mean."""
    code, meaning = Straight(), {}
    alive: list[Value] = []
    for number, (kind, first, second) in enumerate(steps):
        if kind == 0 or len(alive) < 2:
            for i, value in enumerate(code.make_run(f"load{number} {{d0}} {{d1}}", 2)):
                meaning[value] = f"load{number}.{i}"
                alive.append(value)
            alive = alive[-6:]  # of 20 registers, some hold what comes
            continue
        a, c = alive[first % len(alive)], alive[second % len(alive)]
        if kind == 1 or a is c:
            made = code.make("add {d} {0} {1}", a, c)
        else:
            made = code.change("add {d} {0} {1}", a, c)
            alive.remove(a)
        meaning[made] = f"({meaning[a]} {meaning[c]})"
        alive = [*alive, made][-6:]
    for value in alive:
        code.write("store {0}", value)
    return code, [meaning[value] for value in alive]


def executed(lines: list[str]) -> list[str]:
    """What is stored."""
    registers: dict[str, str] = {}
    stored = []
    for line in lines:
        name, *operands = line.split()
        if name == "store":
            stored.append(registers[operands[0]])
        elif name == "add":
            registers[operands[0]] = f"({registers[operands[1]]} {registers[operands[2]]})"
        else:
            first, second = (int(o.removeprefix("v")) for o in operands)
            assert second == first + 1
            registers |= {o: f"{name}.{i}" for i, o in enumerate(operands)}
    return stored


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)), max_size=40),
    st.integers(0, 12),
)
def test_a_program_keeps_its_meaning(steps: list[Step], ahead: int) -> None:
    code, wanted = program(steps)
    assert executed(code.lines(20, ahead)) == wanted


def test_too_few_registers_are_refused() -> None:
    code, _ = program([(0, 0, 0), (0, 0, 0)])
    with pytest.raises(RuntimeError, match="more than 3 vectors live at load1"):
        code.lines(3)


def test_a_value_that_is_overwritten_may_not_be_read_again() -> None:
    code = Straight()
    (a, c) = code.make_run("load {d0} {d1}", 2)
    code.change("add {d} {0} {1}", a, c)
    code.write("store {0}", a)
    with pytest.raises(AssertionError, match="used again"):
        code.lines(8)


def test_operands_and_runs_print_as_such() -> None:
    code = Straight()
    pair = together([Value(), Value()])
    for value in pair:
        code.make_into(value, "mov {d}.16b, {0}.16b", Value(operand=3))
    code.write("tbl {1:z}.b, {{{0:q}}}, {2}", *pair, Value(register=30))
    assert code.lines(4) == ["mov v0.16b, $3.16b", "mov v1.16b, $3.16b", "tbl z1.b, {q0}, v30"]
