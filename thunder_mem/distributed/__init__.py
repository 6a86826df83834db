"""Collectives: one order on every rank, overlap with computation, and a check that all ranks agree."""
