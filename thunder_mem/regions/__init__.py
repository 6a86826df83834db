"""Fused regions of `mem_pointwise`: Inductor fuses in them what nvFuser would fuse."""
