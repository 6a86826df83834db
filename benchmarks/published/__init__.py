"""Peaks that others measured on GPUs, and what is predicted for them: ``python -m benchmarks.published``."""
