"""How bytes get into files."""
