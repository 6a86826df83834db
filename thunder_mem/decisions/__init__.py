"""The decisions about one program, from its joint trace to the order of its operations."""
