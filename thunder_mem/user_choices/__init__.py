"""What `recompute=`, `offload=` and policies say, turned into constraints of a partition."""
