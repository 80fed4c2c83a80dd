"""Device functions that kernels of several folders stand on: headers, and what puts them in front of a text."""
