"""Squeeze-excite: channels scaled by two small products of their means, in one kernel."""
