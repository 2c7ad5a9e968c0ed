"""x86-64: device profiles, the table of linear kernels, and one file per family of kernels."""
