"""One program under several compilers, side by side: memory, time, and differences of results."""
