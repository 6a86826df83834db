"""Loss heads and token-wise stretches become loops over rows, which never hold a wide value whole."""
