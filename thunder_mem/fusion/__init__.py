"""The choice of fusion regions. Knows only graphs, neither Thunder nor PyTorch."""
