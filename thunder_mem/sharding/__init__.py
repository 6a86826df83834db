"""How a split along rows passes through an operation."""
