"""Products with few rows on Hopper, with the operands swapped."""
