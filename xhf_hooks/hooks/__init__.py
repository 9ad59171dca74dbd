"""MMEngine's hook."""
