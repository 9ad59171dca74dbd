"""What a live model is made of."""
