"""Measured tables that are data, not results: kernels and their times, by which models are judged and fitted."""
