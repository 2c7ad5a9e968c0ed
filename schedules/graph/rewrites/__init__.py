"""Rewrites of lowered loops, behind what TensorIR's schedule primitives express."""
