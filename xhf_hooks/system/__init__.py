"""What the machine gives: calls, limits, temporary folders, memory, threads and installed packages."""
