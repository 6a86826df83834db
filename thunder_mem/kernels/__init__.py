"""PyTorch's own kernels for composite operations and gradients that nothing fuses."""
