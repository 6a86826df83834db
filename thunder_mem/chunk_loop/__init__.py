"""The loop over rows that a loss head becomes: its symbols, and what runs them."""
