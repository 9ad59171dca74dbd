"""Writes bytes into files."""
