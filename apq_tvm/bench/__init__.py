"""Benchmarks beside rivals: one linear layer, one whole model, and the machine's own limits."""
