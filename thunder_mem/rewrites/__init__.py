"""Passes over the joint trace, one in each file: trace in, trace out."""
