"""The base model: its files, in its folder or in the local hub cache."""
