"""Saves that a signal, a file or an exception requests, and how ranks agree on the iteration of the save."""
