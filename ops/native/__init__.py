"""C++ kernels for CPU tensors, compiled when the first op runs; the reference kernels serve what they do not."""
