"""The intermediate representation: types, the closed set of primitives, flat graphs, their meaning and clean-ups.

Imports NumPy and `weft.errors`, nothing else. Read `prims` first: it decides what everything means.
"""
