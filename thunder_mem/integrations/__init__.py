"""Other libraries' models and trainers with `MemEfficient`: each module imports its library, and this package none."""
