"""Products by `mma.sync`, by warpgroups without TMA, or on CUDA cores: one skeleton."""
