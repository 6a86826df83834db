"""Thunder's own tests as a judge: what passes without `MemEfficient` and fails with it. See `run.py`."""
