"""Chunk loops for loss heads: from an amplifying matrix product to a loop that never holds its whole result."""
