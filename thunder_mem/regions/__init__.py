"""Fused regions: `mem_pointwise`, which fuses with Inductor what nvFuser would fuse, and the installed nvFuser."""
