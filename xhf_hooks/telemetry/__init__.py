"""What a run tells: log lines, times, memory."""
