"""Plans that were refused: which kernel is wrong, and a bundle from which that can be seen again.

A bundle is a folder under `repro` of the cache: `bundle.json` (what was found, options, environment, the seed of the
inputs), `model.txt` (the graph as it was imported), `plan.json` (the plan's graph, its steps and the text of every
kernel), the wrong kernel's text in a file of its own, and weights and inputs as safetensors where both together are at
most `MOST_BYTES`; larger weights are drawn anew. Its kernels are code: it runs only where this user wrote it, or the
digest of its `bundle.json` is given.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from weft.device.files import is_trusted, private_directory, publish
from weft.errors import ArtifactError, ModelError
from weft.frontends.torch.dtypes import from_numpy, to_numpy
from weft.ir.attrs import ConstantAttrs
from weft.ir.graph import Graph, digest_of
from weft.ir.text import parse_graph, print_graph
from weft.ir.types import Array, DType, round_emulated
from weft.kernels.codec import Json
from weft.kernels.plan import Plan
from weft.kernels.pretty import pretty
from weft.kernels.source import CudaSource, KernelSource
from weft.options import Options
from weft.pipeline import finish, reference
from weft.pipeline.layers import Classes, StepCheck, check_steps
from weft.pipeline.link import link
from weft.pipeline.reference import working_dtype
from weft.pipeline.setting import survey
from weft.pipeline.step_records import call_text
from weft.runtime.any import AnyExecutable
from weft.runtime.artifact import plan_from_json, plan_to_json

SCHEMA = 1
MOST_BYTES = 64 << 20
MOST_BUNDLES = 8
_FILES = ("model.txt", "plan.json", "weights.safetensors", "inputs.safetensors")
_OPTIONS = ("device", "threads", "strict", "allow_tf32", "allow_fast_f8", "seed")
Tensors = Sequence[torch.Tensor]


def culprit(checks: Sequence[StepCheck]) -> StepCheck | None:
    """The first step that is wrong by itself."""
    return next((c for c in checks if not c.ok), None)


def told(check: StepCheck) -> str:
    """A wrong step in one line."""
    return f"kernel {check.step} ({check.schedule}) of {', '.join(check.operators)[:200]} is wrong: {check.note}"


@dataclass(frozen=True, slots=True)
class Case:
    """A plan, what it should compute, and on which inputs."""

    model: Graph
    """As it was imported."""
    graph: Graph
    """That the plan is of."""
    plan: Plan
    classes: Classes
    inputs: Tensors
    drawn: bool
    """Whether the inputs were drawn from the options' seed."""


def keep(
    cache: Path | None, case: Case, note: str, check: StepCheck | None, options: Options, facts: Mapping[str, str]
) -> Path | None:
    """Write a bundle; None where the cache cannot be written. The oldest of more than `MOST_BUNDLES` go."""
    if cache is None:
        return None
    files = _files(case)
    body = {
        "schema": SCHEMA,
        "plan": case.plan.name,
        "note": note,
        "step": None if check is None else asdict(check),
        "options": {name: getattr(options, name) for name in _OPTIONS},
        "environment": dict(facts),
        "classes": sorted(case.classes.items()),
        "drawn_inputs": "inputs.safetensors" not in files,
        "inputs_were_drawn": case.drawn,
        "constants": {d: [t, list(x.shape)] for d, (t, x) in _constants(case.model, case.graph).items()},
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    head = json.dumps(body, indent=1, sort_keys=True).encode()
    digest = hashlib.sha256(head).hexdigest()
    try:
        folder = private_directory(cache / "repro" / digest[:16])
        for name, data in files.items():
            publish(folder / name, data)
        if check is not None:
            publish(folder / _source_name(case.plan, check.step), _source(case.plan, check.step).encode())
        publish(folder / "bundle.json", head)
        publish(cache / "trusted" / digest, b"")
        kept = sorted((cache / "repro").iterdir(), key=lambda p: p.stat().st_mtime_ns)
        for old in kept[:-MOST_BUNDLES]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        return None
    return folder


def _source_name(plan: Plan, step: int) -> str:
    kernel = plan.steps[step].kernel
    suffix = "cu" if isinstance(kernel, CudaSource) else "cpp" if isinstance(kernel, KernelSource) else "txt"
    return f"kernel-{step}.{suffix}"


def _source(plan: Plan, step: int) -> str:
    kernel = plan.steps[step].kernel
    return pretty(kernel.text) if isinstance(kernel, KernelSource | CudaSource) else call_text(kernel)


def _files(case: Case) -> dict[str, bytes]:
    plan = {"graph": print_graph(case.graph, origins=True), "plan": plan_to_json(case.plan)}
    found = {"model.txt": print_graph(case.model, origins=True).encode(), "plan.json": json.dumps(plan).encode()}
    given = {str(k): np.ascontiguousarray(to_numpy(x.cpu())[0]) for k, x in enumerate(case.inputs)}
    left = MOST_BYTES
    if not case.drawn and (size := sum(x.nbytes for x in given.values())) <= left:
        found["inputs.safetensors"] = save_tensors({k: x.reshape(x.shape) for k, x in given.items()})
        left -= size
    weights = {d: np.ascontiguousarray(x).reshape(x.shape) for d, (_, x) in _constants(case.model, case.graph).items()}
    if sum(x.nbytes for x in weights.values()) <= left:
        found["weights.safetensors"] = save_tensors(weights)
    return found


def _constants(*graphs: Graph) -> dict[str, tuple[str, Array]]:
    """Element type and data by digest."""
    return {
        n.attrs.digest: (n.type.dtype.value, g.constants[n.attrs.digest])
        for g in graphs
        for n in g.nodes
        if isinstance(n.attrs, ConstantAttrs)
    }


# -- replay


@dataclass(frozen=True, slots=True)
class Replay:
    """What a bundle shows now."""

    then: str
    """What was found when it was written."""
    whole: finish.Check
    """Of the whole plan."""
    steps: tuple[StepCheck, ...]
    drawn: tuple[str, ...]
    """What was drawn anew: `weights`, `inputs`."""

    @property
    def culprit(self) -> StepCheck | None:
        """The first step that is wrong by itself."""
        return culprit(self.steps)

    @property
    def fails(self) -> bool:
        """Whether anything is wrong still."""
        return not self.whole.ok or self.culprit is not None


def replay(path: Path, options: Options, *, trust: str | None = None) -> Replay:
    """Build the plan of a bundle, run it whole and step by step, and judge both.

    Raises:
        ArtifactError: no bundle, damaged, of another version, or not trusted [W401].
        DeviceError: it was made for a device that is not here [W301].
    """
    body, files = _read(path, options.cache, trust)
    try:
        case, drawn = _case(body, files)
        chosen = replace(options, **cast("dict[str, object]", body["options"]))  # type: ignore[arg-type]
    except (LookupError, TypeError, ValueError, ModelError, SafetensorError) as error:
        raise _refuse(path, f"is malformed ({type(error).__name__})") from error
    setting = survey(chosen)
    executable = link(case.graph, case.plan, setting)
    executable.check_indices = False
    inputs = [x.to(setting.platform.device) for x in case.inputs]
    expected = reference.outputs(case.model, inputs, None, allow_tf32=chosen.allow_tf32)
    contender = finish.Contender(
        case.plan.name, lambda: executable(*inputs), executable.kernels, 0.0, False, executable
    )
    whole = finish.verify(contender, expected, working_dtype(case.graph))
    steps = tuple(check_steps(executable, inputs, case.classes))
    return Replay(str(body.get("note", "")), whole, steps, drawn)


def _refuse(path: Path, problem: str) -> ArtifactError:
    remedy = "`weft compile` names a bundle in the warning of a refused plan; give that folder"
    return ArtifactError(where=path.name, problem=problem, remedy=remedy)


def _read(path: Path, cache: Path | None, trust: str | None) -> tuple[Mapping[str, Json], dict[str, bytes]]:
    try:
        head = (path / "bundle.json").read_bytes()
        body = json.loads(head)
        if not isinstance(body, dict) or body.get("schema") != SCHEMA:
            raise _refuse(path, "was written by another version of Weft")
        listed = {name: body["files"][name] for name in _FILES if name in body["files"]}
        files = {name: (path / name).read_bytes() for name in listed}
    except OSError as error:
        raise _refuse(path, f"is no readable bundle: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _refuse(path, f"is no bundle ({type(error).__name__})") from None
    if any(hashlib.sha256(data).hexdigest() != listed[name] for name, data in files.items()):
        raise _refuse(path, "is damaged: a file differs from its digest")
    digest = hashlib.sha256(head).hexdigest()
    if trust != digest and not (trust is None and is_trusted(cache, digest)):
        problem = "holds native code that is not trusted"
        remedy = f"if you know where it comes from, give --trust {digest}"
        raise ArtifactError(where=path.name, problem=problem, remedy=remedy)
    return body, files


def _case(body: Mapping[str, Json], files: Mapping[str, bytes]) -> tuple[Case, tuple[str, ...]]:
    stored = json.loads(files["plan.json"])
    texts = [files["model.txt"].decode(), str(stored["graph"])]
    constants: dict[str, Array] = {}
    drawn = []
    if "weights.safetensors" in files:
        constants = dict(load_tensors(files["weights.safetensors"]))
    else:
        drawn.append("weights")
        about = cast("Mapping[str, tuple[str, list[int]]]", body["constants"])
        for old, (dtype, shape) in about.items():
            fresh, data = _drawn(old, DType(dtype), tuple(shape))
            constants[fresh] = data
            texts = [t.replace(old, fresh) for t in texts]
    model, graph = (parse_graph(t, constants) for t in texts)
    options = cast("Mapping[str, int]", body["options"])
    if "inputs.safetensors" in files:
        given = load_tensors(files["inputs.safetensors"])
        types = [model.type_of(n) for n in model.inputs]
        inputs = [from_numpy(given[str(k)], t.dtype) for k, t in enumerate(types)]
    else:
        inputs = reference.example_inputs(model, options["seed"])
        if not body["inputs_were_drawn"]:
            drawn.append("inputs")
    pairs = cast("Sequence[tuple[int, int]]", body["classes"])
    classes = {int(a): int(b) for a, b in pairs}
    case = Case(model, graph, plan_from_json(stored["plan"]), classes, inputs, "inputs.safetensors" not in files)
    return case, tuple(drawn)


def _drawn(digest: str, dtype: DType, shape: tuple[int, ...]) -> tuple[str, Array]:
    """Data of a type and shape, the same for the same digest: small numbers around zero, or 0 and 1."""
    rng = np.random.default_rng(int(digest[:16], 16))
    small = rng.standard_normal(shape) * 0.1 if dtype.is_float else rng.integers(0, 2, shape)
    data: Array = round_emulated(np.asarray(small).astype(dtype.numpy), dtype)
    return digest_of(dtype, data), data


# -- after a plan was refused


def blame(
    executable: AnyExecutable,
    case: Case,
    note: str,
    options: Options,
    facts: Mapping[str, str],
    warn: Callable[[str], None],
    *,
    seconds: float,
) -> str:
    """What is wrong with a plan that was refused, in words; where a kernel is, a bundle is kept and the user told.

    A plan of kernels that are all right by themselves adds their rounding up to more than the model may be off by.
    """
    checks = check_steps(executable, case.inputs, case.classes, until=time.monotonic() + seconds)
    wrong = culprit(checks)
    if wrong is None:
        looked = len(checks)
        every = (
            "each kernel is right by itself" if looked == len(case.plan.steps) else f"the first {looked} kernels are"
        )
        return f"{note}; {every}"
    said = told(wrong)
    folder = keep(options.cache, case, f"{note}; {said}", wrong, options, facts)
    place = f"; `weft repro {folder}` shows it again" if folder is not None else ""
    warn(f"Weft refuses the plan {case.plan.name} ({note}): {said}{place}")
    return f"{note}; {said}"
