"""The commands of the package; tools/ has a thin script for each."""
