"""Commits a staging folder under its final name, and deletes old saves."""
