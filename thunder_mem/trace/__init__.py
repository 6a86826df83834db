"""Thunder traces read as graphs and written again: effects, aliases, layouts, order, verification."""
