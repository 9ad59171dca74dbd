"""What a checkpoint folder is, and whether it still is: what commit/ and verify/ have in common."""
