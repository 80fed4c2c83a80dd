"""Kernels that others wrote (`.cu` files) as roles."""
