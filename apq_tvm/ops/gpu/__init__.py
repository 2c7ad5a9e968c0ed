"""Operators as GPUs want them: what threads do together stands in one PrimFunc."""
