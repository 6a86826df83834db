"""The run book for a machine with a GPU: `bash benchmarks/gpu/run.sh`."""
