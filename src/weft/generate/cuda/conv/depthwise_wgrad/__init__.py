"""Gradients of the weights of depthwise convolutions on CUDA cores."""
