"""``upload_to``: ranks share the upload of each committed save, in the background."""
