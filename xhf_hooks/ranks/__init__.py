"""What connects the ranks: votes, broadcasts, and how ranks find each other."""
