"""Depthwise convolutions on CUDA cores."""
