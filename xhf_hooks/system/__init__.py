"""What the machine gives: calls, limits, errors that name a file, memory, threads and installed packages."""
