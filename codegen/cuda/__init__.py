"""GPU modules: kernels as CUDA source, their images, the tables by which they are launched."""
