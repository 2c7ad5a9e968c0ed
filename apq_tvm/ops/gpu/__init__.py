"""Operators as GPUs want them: what a warp does together stands in one PrimFunc with its threads."""
