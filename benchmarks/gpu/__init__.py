"""The run book for a machine with a GPU: `make gpu`, or `bash benchmarks/gpu/run.sh`."""
