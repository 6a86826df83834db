"""The loop over rows that replaces a loss head: its symbols and its runtime."""
