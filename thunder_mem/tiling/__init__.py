"""From an amplifying matrix product to the loop that never holds its whole result."""
