"""Attention as one kernel: `mma.sync` or CUDA cores, Hopper's warpgroups, linear attention."""
