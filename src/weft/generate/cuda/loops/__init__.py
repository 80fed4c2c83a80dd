"""Fused loops without products: elements, rows of reductions, pools, one CUDA source for each problem."""
