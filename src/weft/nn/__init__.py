"""Modules that run in generated kernels, activations that torch has no module for, recorded steps of training."""

from __future__ import annotations

from weft.nn.fused_mlp import FusedMLP
from weft.nn.fused_network import FusedNetwork
from weft.nn.graphed import GraphedStep
from weft.nn.layers import Sine

__all__ = ["FusedMLP", "FusedNetwork", "GraphedStep", "Sine"]
