"""Attention as one operation: by PyTorch's kernels of a CPU and of a GPU, with a mask, by cuDNN, and by heads."""
