"""How many rows a chunk or a tile has, and the time and bytes that it costs."""
