"""Attention as one operation: by PyTorch's kernels of a CPU and of a GPU, by cuDNN, and in groups of heads."""
