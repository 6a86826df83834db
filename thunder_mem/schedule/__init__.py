"""In which order operations run, and how far from the least peak that is. Knows neither Thunder nor PyTorch."""
