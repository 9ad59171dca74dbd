"""``upload_to``: the files of each committed save go to a store in the background, shared out among the ranks."""
