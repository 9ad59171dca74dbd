"""Finished runs: their checkpoints, the model rebuilt on the meta device, conversion and verification."""
