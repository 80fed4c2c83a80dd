"""The kernels that a benchmark network's plan on a GPU has, without a GPU: what is generated, nothing measured."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from benchmarks.models import load

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc
from weft.frontends.torch import import_exported
from weft.ir.passes import clean_up
from weft.kernels.plan import Plan
from weft.kernels.source import CudaSource
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline.problems import collect
from weft.pipeline.setting import Setting, limits_of
from weft.pipeline.untuned import plan_in
from weft.platform.cuda.platform import Cuda


def graph_of(name: str, batch: int = 1, dtype: torch.dtype = torch.float16) -> Alternatives:
    """The network as a graph, with all that may be computed instead."""
    module, inputs = load(name, batch)
    cast = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    with torch.no_grad():
        program = torch.export.export(module.eval().to(dtype), cast)
    return find_alternatives(clean_up(import_exported(program).graph, strict=False).graph, on_gpu=True)


def plan_of(found: Alternatives, facts: GpuFacts, nvrtc: Nvrtc, way: str = "fused") -> Plan:
    """The plan of few large kernels by estimates, for a GPU of these facts."""
    setting = Setting(Options(device="cuda"), Cuda(facts, nvrtc))
    candidates = enumerate_candidates(found.graph, limits_of(setting.options), found).candidates
    return plan_in(way, collect(found.graph, candidates, found, facts), found, setting)


def texts_of(plan: Plan) -> Mapping[str, CudaSource]:
    """Distinct generated kernels."""
    return {s.kernel.sha256: s.kernel for s in plan.steps if isinstance(s.kernel, CudaSource)}
