"""What goes on beside training: saves that a signal requests, and the command after each save."""
