"""Tables, curves and timelines as text, page or picture."""
