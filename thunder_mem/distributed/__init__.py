"""Collectives: one order of them on every rank, what they hide, and whether all ranks agree."""
