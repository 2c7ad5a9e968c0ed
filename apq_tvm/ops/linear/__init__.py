"""Linear layers on any instruction set: the problem, its loops, and kernels without intrinsics."""
