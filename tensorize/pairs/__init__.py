"""Scaffolds of TensorIntrin pairs: operands and plain loops for a meaning, for any instruction."""
