"""Modules that run in generated kernels: `FusedMLP`, activations that torch has not, steps of training as one launch."""

from __future__ import annotations

from weft.nn.fused_mlp import FusedMLP
from weft.nn.graphed import GraphedStep
from weft.nn.layers import Sine

__all__ = ["FusedMLP", "GraphedStep", "Sine"]
