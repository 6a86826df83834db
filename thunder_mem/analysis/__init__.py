"""Questions that need several plans: the cost of each budget, the largest batch that fits."""
