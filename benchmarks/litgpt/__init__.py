"""Thunder's own training benchmark, with and without MemEfficient, on a GPU, a CPU, or a GPU that is not there.

`python -m benchmarks.litgpt` is one run, `python -m benchmarks.litgpt.table` the matrix of
models and compilers. Both need the extra `benchmark` (``pip install thunder-mem[benchmark]``).
"""
