"""Where saves go: a folder and its sibling folders, and a store to which they are uploaded."""
