"""Peers that are no Python package: what is built of their sources, and how it is called."""
