"""Ranks: agreement between them, and whether they share a file system."""
