"""Kernels of GPUs: machine code judged here, bundles that measure them where there is a GPU."""
