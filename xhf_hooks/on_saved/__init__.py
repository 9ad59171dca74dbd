"""Runs a command or a function after each save, while training goes on."""
