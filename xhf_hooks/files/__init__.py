"""Files of the operating system, read with care."""
