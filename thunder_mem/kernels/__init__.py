"""The executor `mem_kernels`: PyTorch's own kernels for composite operations, for programs without fusion."""
