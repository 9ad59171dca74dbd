"""Saves that a signal or a file asks for while a run trains: who asks, and at which iteration all ranks save."""
