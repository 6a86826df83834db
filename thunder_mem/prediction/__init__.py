"""Predicted peaks: final traces and whole training steps on fake tensors."""
