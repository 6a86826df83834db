"""Passes over the joint trace, one a file: trace in, trace out."""
