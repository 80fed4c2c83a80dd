"""Benchmarks: each prints JSON lines with an environment header and keeps them under `benchmarks/results/`."""
