"""Tensors of a live model, and its wrappers."""
