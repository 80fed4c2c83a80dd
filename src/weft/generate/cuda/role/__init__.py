"""Roles, and the kernels that are made of them."""
