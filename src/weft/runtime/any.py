"""An executable of whatever device."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.ir.graph import Graph
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Executable

AnyExecutable = Executable | CudaExecutable


def place_of(executable: AnyExecutable) -> torch.device:
    """Where its inputs must be."""
    return executable.device if isinstance(executable, CudaExecutable) else torch.device("cpu")


def with_graph(executable: AnyExecutable, graph: Graph) -> AnyExecutable:
    """The same plan with the constants of another graph, which has the same nodes: its weights are packed anew."""
    linked = replace(executable.linked, graph=graph)
    if isinstance(executable, CudaExecutable):
        return CudaExecutable(linked, device=executable.device)
    return Executable(linked)
