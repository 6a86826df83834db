"""Traces and eager programs run on fake tensors, storage by storage, with the scratch of each operator."""
