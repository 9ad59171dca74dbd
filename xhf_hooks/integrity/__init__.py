"""The manifest of a folder, and the checks that saving and xhf-verify share."""
