"""Co-location of two jobs on one GPU."""
