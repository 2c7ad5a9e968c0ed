"""Large-M ``W2*`` layers: codes are taken apart to bytes once a panel.

A panel is one row block of `apq_tvm.codegen.layouts.balance`: its three thirds are the panel's
three vectors of columns. The rest is `apq_tvm.ops.many_rows.bytes`.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, BalanceLayout
from apq_tvm.formats.balance import CENTRE, TRIPLE
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.bytes import ByteGemm
from apq_tvm.ops.many_rows.task import GemmBlocking, around
from apq_tvm.tensorize.exprs import Buffer, Expr, i64
from apq_tvm.tensorize.meaning.balance import VECTORS, balance_digits
from apq_tvm.tensorize.meaning.scaffold import View, product


class BalanceGemm(ByteGemm):
    """A panel is one row block of the layout: its thirds are the panel's vectors."""

    def __init__(self, spec: LinearSpec, layout: BalanceLayout, blocking: GemmBlocking) -> None:
        assert blocking.vectors == TRIPLE
        k = spec.k
        super().__init__(
            spec, layout, blocking, layout.lanes, layout.group_width(k), layout.padded_groups(k)
        )
        self.strands = 1
        # The last panel may have vectors past N: they are computed, but not stored.
        self.shared_columns = self.row_blocks % TRIPLE != 0

    @property
    def _block(self) -> Expr:
        """Row block of the layout."""
        return self.panel // i64(TRIPLE)

    def row_block(self, j: Expr) -> Expr:
        """Vector of L columns of the panel's third j, past the end in the last panel."""
        return self.panel + j

    def fill_units(self, kb: Expr) -> None:
        """The thirds of a unit are decoded together."""
        units = self.blocking.k_block // UNIT_K
        with around("unit", (self.count(units, self.k // UNIT_K, kb), units)) as (u,):
            self.decode_unit(kb, i64(0), u)

    def prefetch(self, kb: Expr, j: Expr, u: Expr) -> None:
        codes = self.weights["codes"]
        block, unit = self.following(kb, self._block, 1, u)
        self.prefetch_lines(lambda byte: codes[block, unit, byte], self.layout.unit_bytes)

    def decode_unit(self, kb: Expr, j: Expr, u: Expr) -> None:
        codes = View(
            self.weights["codes"], (self._block, kb * (self.blocking.k_block // UNIT_K) + u, 0)
        )
        digits = View(self.decoded, (0, u * VECTORS, 0, 0))
        product(balance_digits(self.lanes), "digits", lambda: (codes, digits))

    def of_group(self, name: str, j: Expr, group: Expr, r: Expr) -> Expr:
        return self.weights[name][self._block, group, j * self.lanes + r]

    def offset(self, j: Expr, group: Expr, r: Expr) -> Expr:
        return tirx.const(CENTRE, "int32")

    def _write_vector(self, name: str, results: Buffer, m: Expr, j: Expr, lanes: int) -> None:
        if self.shared_columns and name == "store":
            with b.If(self.row_block(j) < i64(self.row_blocks)), b.Then():
                super()._write_vector(name, results, m, j, lanes)
        else:
            super()._write_vector(name, results, m, j, lanes)
