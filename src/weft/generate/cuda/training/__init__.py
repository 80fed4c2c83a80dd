"""Training of fully connected networks: forward as a problem of the mlp template, gradients as three kernels."""

from __future__ import annotations

from weft.generate.cuda.activations import KINDS, Kept, Kind
from weft.generate.cuda.training.activation import Activation, called
from weft.generate.cuda.training.chain import ChainConfig
from weft.generate.cuda.training.formula import IDENTITY, Formula, formula
from weft.generate.cuda.training.gradient import Gradient, gradient, shapes
from weft.generate.cuda.training.network import Added, Network, ParameterSlice, forward_problem
from weft.generate.cuda.training.step import Step, gradient_problem, step

__all__ = [
    "IDENTITY",
    "KINDS",
    "Activation",
    "Added",
    "ChainConfig",
    "Formula",
    "Gradient",
    "Kept",
    "Kind",
    "Network",
    "ParameterSlice",
    "Step",
    "called",
    "formula",
    "forward_problem",
    "gradient",
    "gradient_problem",
    "shapes",
    "step",
]  # fmt: skip
