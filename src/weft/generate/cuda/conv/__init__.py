"""Convolutions that are more than a product: tiles of the image in shared memory, and two steps in one kernel."""
