"""Checks that a model folder is complete and unchanged, and compares two models."""
