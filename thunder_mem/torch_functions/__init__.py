"""PyTorch's functions that Thunder gets wrong, or passes on whole, in operations that it differentiates and fuses."""
