"""Final traces and whole training steps on fake tensors: how many bytes a device will hold."""
