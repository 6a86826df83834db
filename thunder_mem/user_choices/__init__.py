"""`recompute=`, `offload=` and policies, turned into constraints of a partition."""
