"""Convolutions from a tile of the image, with its halo, in shared memory."""
