"""Seconds and library memory: a roofline, the same on every rank, and measured times for those who ask."""
