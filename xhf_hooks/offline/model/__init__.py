"""Rebuilds the model of a checkpoint on the meta device, for the exporters."""
