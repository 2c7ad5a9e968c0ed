"""An order of straight assembly in which a Neoverse N1's slots are filled (LLVM's model).

Three slots are filled in a cycle, in order, and an instruction whose operations do not fit what is
left of them waits for the next cycle: ``ldr`` of a vector has two, ``ldp`` three, ``ld1`` one for
each vector. Source: LLVM's AArch64SchedNeoverseN1.td, and the dispatch stage of llvm-mca.
"""

from __future__ import annotations

from apq_tvm.tensorize.arm.written.straight import Instruction, dependencies, growth

_SLOTS = 3


def filled(
    instructions: list[Instruction], registers: int, ahead: int, spare: int
) -> list[Instruction]:
    """The same instructions; one that would leave slots empty lets a later one pass.

    Parameters
    ----------
    instructions : list of Instruction
    registers : int
        Of vectors.
    ahead : int
        How many instructions are looked at for the next one.
    spare : int
        Registers left to the instruction that is next as written.
    """
    before, left = dependencies(instructions)
    done: set[int] = set()
    order: list[Instruction] = []
    waiting, used, live = list(instructions), 0, 0
    while waiting:
        best = None
        for each in waiting[:ahead]:
            if not before[id(each)] <= done:
                continue
            grows, most = growth(each, left), registers - spare
            if each is not waiting[0] and grows > 0 and live + grows > most:
                continue
            wasted, after = _empty(each, used)
            if best is None or wasted < best[0]:
                best = (wasted, each, grows, after)
            if not wasted:
                break
        assert best is not None
        _, each, grows, used = best
        live += grows
        for value in set(each.read):
            if value in left:
                left[value] -= each.read.count(value)
        done.add(id(each))
        waiting.remove(each)
        order.append(each)
    return order


def _empty(each: Instruction, used: int) -> tuple[int, int]:
    """Slots left empty before an instruction, and those of a cycle filled after it."""
    count = {"ldr": 2, "ldp": 3, "ld1": len(each.made)}.get(each.mnemonic, 1)
    wasted = 0
    if min(count, _SLOTS) > _SLOTS - used:
        wasted, used = _SLOTS - used, 0
    return wasted, (used + count) % _SLOTS
