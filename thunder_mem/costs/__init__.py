"""Execution times: a roofline that is the same on every rank, and measured times on request."""
