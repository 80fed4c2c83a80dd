"""Modules that run in generated kernels: `FusedMLP`, and activations that torch has no module for."""

from __future__ import annotations

from weft.nn.fused_mlp import FusedMLP
from weft.nn.layers import Sine

__all__ = ["FusedMLP", "Sine"]
