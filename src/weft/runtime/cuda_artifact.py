"""Saved plans for a GPU: cubins from the file where they fit this GPU, else compiled again from the sources."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.device.files import doing_without, publish, read_private
from weft.errors import ArtifactError, DeviceError, OptionError
from weft.generate.library.algorithm import Engine, chosen
from weft.generate.library.conv_call import engines
from weft.generate.library.lt_call import library
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.kernels.plan import Plan
from weft.kernels.source import CudaSource
from weft.options import parse_text
from weft.runtime.artifact import Read
from weft.runtime.budgeted import SM_BUDGET, Budgeted
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Linked
from weft.sm_budget import SmBudget


def saved(read: Read) -> CudaExecutable:
    """A plan that was read, on the current GPU: see `link`."""
    return link(read.path, read.graph, read.plan, read.members, read.facts, read.cache_dir)


def link(
    path: Path,
    graph: Graph,
    plan: Plan,
    members: Mapping[str, bytes],
    facts: Mapping[str, str],
    cache_dir: Path | None,
) -> CudaExecutable:
    """Make a checked and trusted plan runnable on the current GPU.

    Raises:
        DeviceError: no GPU here, one that lacks what a kernel needs, or no compiler for another architecture [W301].
        ArtifactError: a product's algorithm is of another version of cuBLASLt, or a convolution's engine of another
            cuDNN, or one was chosen for another GPU [W401].
    """
    if not torch.cuda.is_available():
        raise DeviceError(where=path.name, problem="the plan was made for an NVIDIA GPU, and torch sees none here")
    major, minor = torch.cuda.get_device_capability()
    here = major * 10 + minor
    _check_algorithms(path, plan)
    objects: dict[str, Path] = {}
    for step in plan.steps:
        source = step.kernel
        if not isinstance(source, CudaSource) or source.sha256 in objects:
            continue
        if here < source.capability or (source.exact_arch and facts.get("capability") != str(here)):
            raise DeviceError(
                where=path.name, problem=f"a kernel needs compute capability {source.capability}, this GPU has {here}"
            )
        objects[source.sha256] = _cubin(path, source, members, facts, here, cache_dir)
    linked, budgeted = Linked(graph, plan, objects, None, cache_dir, 0, facts), _budgeted(path, facts)
    return CudaExecutable(linked) if budgeted is None else CudaExecutable(linked, budgeted=budgeted)


def _budgeted(path: Path, facts: Mapping[str, str]) -> Budgeted | None:
    """Under which budget of an SM the plan was made; its kernels are checked against it on this GPU again."""
    if SM_BUDGET not in facts:
        return None
    try:
        budget = cast("SmBudget", parse_text(SM_BUDGET, "SmBudget", facts[SM_BUDGET]))
    except OptionError as error:
        problem = f"its {SM_BUDGET} is none: {error.details['problem']}"
        raise ArtifactError(where=path.name, problem=problem, remedy="save the plan again") from None
    try:
        return Budgeted(gpu_facts(None, device=torch.cuda.current_device(), calibrate=False).within(budget))
    except ValueError as error:
        problem = f"it was made under {SM_BUDGET} {budget}, but {error}"
        raise ArtifactError(where=path.name, problem=problem, remedy="compile the model on this GPU") from None


def _check_algorithms(path: Path, plan: Plan) -> None:
    """Another algorithm may add up in another order: what is recorded runs, or the plan is refused."""
    for algorithm in (x for step in plan.steps for x in chosen(step.kernel)):
        convolves = isinstance(algorithm, Engine)
        found = engines() if convolves else library()
        if isinstance(found, Declined):
            named = "convolutions name engines of cuDNN" if convolves else "products name algorithms of cuBLASLt"
            problem = f"its {named}, but {found.reason}"
            raise ArtifactError(where=path.name, problem=problem, remedy="compile the model again on this machine")
        algorithm.check(found.version, found.gpu, path.name)


def _cubin(
    path: Path,
    source: CudaSource,
    members: Mapping[str, bytes],
    facts: Mapping[str, str],
    here: int,
    cache: Path | None,
) -> Path:
    data = members.get(f"objects/{source.sha256}") if facts.get("capability") == str(here) else None
    if data is not None and cache is not None:
        place = cache / "loaded" / f"{hashlib.sha256(data).hexdigest()}.cubin"
        with doing_without(cache):
            if not (place.is_file() and read_private(place) == data):
                publish(place, data)
            return place
    compiler = find_nvrtc()
    if isinstance(compiler, Declined):
        raise DeviceError(where=path.name, problem=f"the plan must be compiled again, but {compiler.reason}")
    arch = f"sm_{here}{'a' if here >= 90 else ''}"
    made = compiler.compile(
        source.text, arch=arch, flags=source.flags, max_registers=source.max_registers, cache_dir=cache
    )
    return made.path
