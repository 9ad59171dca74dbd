"""The frozen plan of a save and the records that pass through it."""
