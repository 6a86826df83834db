"""Real models, peers and measurements; nothing in `thunder_mem` imports it."""
