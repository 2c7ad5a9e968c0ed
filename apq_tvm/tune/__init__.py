"""The tuner: searches the decisions of a model's kernels on a device, and records what is faster."""
