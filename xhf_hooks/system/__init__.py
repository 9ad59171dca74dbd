"""What the operating system gives: calls, limits, temporary folders, memory and threads."""
