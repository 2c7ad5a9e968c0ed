"""What rewrites of Relax have in common."""

from __future__ import annotations

import tvm
from tvm import relax


def rewritten(mutator: relax.PyExprMutator, mod: tvm.IRModule) -> tvm.IRModule:
    """The module that `mutator` was made of, its ``main`` visited by it."""
    main = mod.get_global_var("main")
    mutator.builder_.update_func(main, mutator.visit_expr(mod[main]))
    return mutator.builder_.get()
