"""What each operation does to memory: what it writes, aliases, draws, lays out, and holds as scratch."""
