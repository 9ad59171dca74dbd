"""Converts the checkpoint of a finished run into a Hugging Face folder; see :mod:`.conversion`."""
