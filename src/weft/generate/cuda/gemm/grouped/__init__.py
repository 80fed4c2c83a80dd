"""Products of different sizes in one launch."""
