"""The executors that fuse: which are here, which operations they take, and nvFuser, installed or simulated."""
