"""64-bit Arm: device profiles, the table of linear kernels, and one file per family of kernels."""
