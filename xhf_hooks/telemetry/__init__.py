"""Log lines, times and memory of saves."""
