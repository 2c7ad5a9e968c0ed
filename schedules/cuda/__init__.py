"""NVIDIA GPUs: device profiles, the table of linear kernels, and the rules of everything else."""
