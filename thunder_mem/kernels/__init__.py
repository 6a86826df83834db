"""PyTorch's own kernels of composite operations, for programs that nothing fuses: the executor `mem_kernels`."""
