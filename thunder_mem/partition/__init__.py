"""The choice of what is saved, recomputed or offloaded. Knows neither Thunder nor PyTorch."""
