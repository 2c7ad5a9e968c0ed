"""The tuner: searches decisions of kernels on a device, and records what is faster."""
