"""Products with so few rows that the weights are read once and nothing is tiled."""
