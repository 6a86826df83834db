"""The order of operations, and its distance from the least peak. Knows neither Thunder nor PyTorch."""
