"""The demo: its model and data, and a look at what came out."""
