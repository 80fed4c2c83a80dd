"""Kernels as source text or library calls: the interface of a generator, and those that come with Weft."""
