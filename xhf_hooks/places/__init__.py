"""Where saves go: a folder and what lies beside it, and their copies in a store."""
