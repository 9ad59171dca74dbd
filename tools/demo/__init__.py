"""The demo: its model and data, and a check of the results."""
