"""What is done after each save, beside training: a command, or a function."""
