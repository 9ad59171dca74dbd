"""Where saves go: a folder, a store, and the upload of a committed save."""
