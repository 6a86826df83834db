"""Thunder's own training benchmark, with and without MemEfficient, on a GPU, a CPU, or a GPU that is not there.

`python -m thunder_mem.benchmarks.litgpt` is one run, `python -m thunder_mem.benchmarks.table` the matrix of
models and compilers. Both need the extra `benchmark` (``pip install thunder-mem[benchmark]``).
"""
