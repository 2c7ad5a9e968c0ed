"""What kernels want done to x: rounding to int8, sums, tables, orders."""
