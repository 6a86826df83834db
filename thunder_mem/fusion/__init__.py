"""Which operations run as one region. Knows graphs alone, neither Thunder nor PyTorch."""
