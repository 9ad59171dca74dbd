"""Threads and memory of background saves."""
