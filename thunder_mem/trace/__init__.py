"""Thunder traces read as graphs and written again: order, emission, origins of values, verification."""
