"""Ranks: agreement, and what they see of one file system."""
