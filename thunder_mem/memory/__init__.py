"""The memory model: graphs, live ranges, plans, bytes. Knows neither Thunder nor PyTorch."""
