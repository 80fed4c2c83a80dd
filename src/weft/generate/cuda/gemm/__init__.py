"""Products and convolutions as matrix products: what they share, and a folder for each template."""
