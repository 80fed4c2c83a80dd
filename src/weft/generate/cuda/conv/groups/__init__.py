"""Convolutions in groups of few channels, on tensor cores."""
