"""Saved plans: one file with a manifest, the plan as JSON, weights as safetensors, sources and objects by SHA-256.

A saved plan with generated kernels, recorded algorithms of a native library, or operators that do not check what they
are given (`admitted`), is code. It loads only when the SHA-256 of its manifest is trusted: given by the caller, or
recorded by this user's own `save`. Nothing is unpacked to names from the file; sizes and counts are capped; every
member is checked against the manifest before it is looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from weft.device.files import doing_without, is_trusted, publish, read_private, record_trust
from weft.device.kinds import KINDS, part
from weft.device.toolchain import HostCompiler, cpu_target, find_compiler
from weft.errors import ArtifactError, DeviceError
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.text import parse_graph, print_graph
from weft.ir.types import Array
from weft.kernels.candidate import Kind
from weft.kernels.codec import Json, kernel_from_json, kernel_to_json, schedule_from_json, schedule_to_json
from weft.kernels.formats import Format
from weft.kernels.plan import MOST_BRANCHES, MOST_THREADS, IndexCheck, Plan, SolverReport, Step
from weft.kernels.source import CudaSource, KernelSource
from weft.runtime.admitted import needs_trust
from weft.runtime.any import AnyExecutable
from weft.runtime.call_form import CallForm, form_of
from weft.runtime.executable import Executable, Linked

SCHEMA = 1
MAX_MEMBERS = 20_000
MAX_JSON_BYTES = 512 << 20
MAX_BYTES = 64 << 30
_NAME = re.compile(r"(manifest\.json|plan\.json|weights\.safetensors|(sources|objects)/[0-9a-f]{64})")


def _refuse(path: Path, problem: str, remedy: str = "save the plan again with this version of Weft") -> ArtifactError:
    return ArtifactError(where=path.name, problem=problem, remedy=remedy)


# -- plans as JSON


def plan_to_json(plan: Plan) -> Json:
    """A plan without its graph."""
    solver = plan.solver
    return {
        "name": plan.name,
        "solver": None if solver is None else {f: getattr(solver, f) for f in SolverReport.__dataclass_fields__},
        "steps": [_step_to_json(s) for s in plan.steps],
        **({"branches": plan.branches} if plan.branches != 1 else {}),
        **({"threads": plan.threads} if plan.threads else {}),
        **({"checks": [list(astuple(c)) for c in plan.checks]} if plan.checks else {}),
    }


def _step_to_json(step: Step) -> Json:
    return {
        "kernel": kernel_to_json(step.kernel),
        "inputs": [[n, f.value] for n, f in step.inputs],
        "outputs": [[n, f.value] for n, f in step.outputs],
        "members": list(step.members),
        "kind": step.kind.value,
        "problem_key": step.problem_key,
        "cost_us": step.cost_us,
        "measured": step.measured,
        "runner_up": None if step.runner_up is None else schedule_to_json(step.runner_up),
        "runner_up_us": step.runner_up_us,
    }


def plan_from_json(data: Json) -> Plan:
    """Inverse of `plan_to_json`.

    Raises:
        ArtifactError: not such a value [W401].
    """
    try:
        record = cast("Mapping[str, Json]", data)
        solver = record["solver"]
        return Plan(
            name=str(record["name"]),
            steps=tuple(_step_from_json(s) for s in cast("Sequence[Json]", record["steps"])),
            solver=None if solver is None else SolverReport(**cast("dict[str, object]", solver)),  # type: ignore[arg-type]
            branches=_branches(record.get("branches", 1)),
            threads=_threads(record.get("threads", 0)),
            checks=tuple(_check(c) for c in cast("Sequence[Json]", record.get("checks", ()))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(problem=f"malformed plan ({error})", remedy="save the plan again") from None


def _check(data: Json) -> IndexCheck:
    output, low, bound, operator, given = cast("Sequence[Json]", data)
    numbers = [n for n in (output, low, bound, given) if type(n) is int]
    if len(numbers) != 4 or not isinstance(operator, str) or numbers[0] < 0:
        raise ValueError("a check of indices")
    return IndexCheck(numbers[0], numbers[1], numbers[2], operator, numbers[3])


def _threads(data: Json) -> int:
    if type(data) is not int or not 0 <= data <= MOST_THREADS:
        raise ValueError(f"{data!r} threads")
    return data


def _branches(data: Json) -> int:
    if not isinstance(data, int) or not 1 <= data <= MOST_BRANCHES:
        raise ValueError(f"{data!r} branches")
    return data


def _step_from_json(data: Json) -> Step:
    record = cast("Mapping[str, Json]", data)

    def keys(name: str) -> tuple[tuple[int, Format], ...]:
        pairs = cast("Sequence[tuple[int, str]]", record[name])
        return tuple((int(n), Format(f)) for n, f in pairs)

    runner_up = record["runner_up"]
    return Step(
        kernel=kernel_from_json(record["kernel"]),
        inputs=keys("inputs"),
        outputs=keys("outputs"),
        members=tuple(cast("Sequence[int]", record["members"])),
        kind=Kind(record["kind"]),
        problem_key=str(record["problem_key"]),
        cost_us=float(cast("float", record["cost_us"])),
        measured=bool(record["measured"]),
        runner_up=None if runner_up is None else schedule_from_json(runner_up),
        runner_up_us=float(cast("float", record["runner_up_us"])),
    )


# -- saving


def save(linked: Linked, path: Path, *, trust_dir: Path | None, call: CallForm | None = None) -> str:
    """Write the file; give back the SHA-256 of its manifest, which is also recorded under `trust_dir`.

    `call`: how it is called and what it gives; None: tensors by place, and one is a tensor, several are a tuple.

    Raises:
        ArtifactError: the file cannot be written.
    """
    graph, plan = linked.graph, linked.plan
    members: dict[str, bytes] = {
        "plan.json": json.dumps({"graph": print_graph(graph), "plan": plan_to_json(plan)}).encode(),
        "weights.safetensors": save_tensors({d: _plain(x) for d, x in _used_constants(graph).items()}),
    }
    for step in plan.steps:
        if isinstance(step.kernel, KernelSource | CudaSource):
            sha = step.kernel.sha256
            members[f"sources/{sha}"] = step.kernel.text.encode()
            with contextlib.suppress(OSError, KeyError):  # a lost object is compiled again from the source
                members[f"objects/{sha}"] = linked.objects[sha].read_bytes()
    manifest = {
        "schema": SCHEMA,
        "device": linked.kind,
        "target": cpu_target() if linked.kind == "cpu" else linked.target,
        "threads": linked.threads,
        "facts": dict(linked.facts),
        **({"call": call.to_json()} if call is not None else {}),
        "members": {k: {"sha256": hashlib.sha256(v).hexdigest(), "bytes": len(v)} for k, v in sorted(members.items())},
    }
    head = json.dumps(manifest, sort_keys=True).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in [("manifest.json", head), *sorted(members.items())]:
            archive.writestr(zipfile.ZipInfo(name), data)
    try:
        publish(path, buffer.getvalue(), private=False) if path.parent.is_dir() else _no_folder(path)
    except OSError as error:
        raise _refuse(path, f"cannot be written: {error.strerror}", "choose another place") from None
    digest = hashlib.sha256(head).hexdigest()
    record_trust(trust_dir, digest)
    return digest


def _no_folder(path: Path) -> None:
    raise _refuse(path, f"the folder {path.parent} does not exist", "make it first")


def _used_constants(graph: Graph) -> dict[str, Array]:
    from weft.ir.attrs import ConstantAttrs

    used = [n.attrs.digest for n in graph.nodes if isinstance(n.attrs, ConstantAttrs)]
    return {d: graph.constants[d] for d in used}


def _plain(data: Array) -> Array:
    return np.ascontiguousarray(data).reshape(data.shape)


# -- loading


@dataclass(frozen=True, slots=True)
class Read:
    """A saved plan that was read and is trusted; nothing of it is on a device yet."""

    path: Path
    graph: Graph
    plan: Plan
    members: Mapping[str, bytes]
    """The file's parts by name."""
    manifest: Mapping[str, Json]
    facts: Mapping[str, str]
    """What the plan was made for."""
    cache_dir: Path | None
    threads: int
    """As the caller wants them; 0: as the plan has them."""


def load(path: Path, *, trust: str | None = None, cache_dir: Path | None = None, threads: int = 0) -> AnyExecutable:
    """Read a saved plan and make it runnable, on the kind of device that it was made for.

    Raises:
        ArtifactError: damaged, of another schema, too large, not the file whose digest is `trust`, or holding code that
            is not trusted [W401].
    """
    return load_called(path, trust=trust, cache_dir=cache_dir, threads=threads)[0]


def load_called(
    path: Path, *, trust: str | None = None, cache_dir: Path | None = None, threads: int = 0
) -> tuple[AnyExecutable, CallForm | None]:
    """The same, and how it is called; None: with tensors by place.

    Raises:
        ArtifactError: as `load` [W401].
    """
    members, manifest, digest = _read(path)
    if trust is not None and trust != digest:
        raise _refuse(
            path,
            f"is not the file that is trusted: its digest is {digest}, not {trust[:64]!r}",
            "ask where the file comes from which digest it has; a plan that you saved needs none",
        )
    try:
        body = json.loads(members["plan.json"])
        constants: dict[str, Array] = dict(load_tensors(members["weights.safetensors"]))
        graph = parse_graph(str(body["graph"]), constants)
        plan = plan_from_json(body["plan"])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        raise _refuse(path, f"malformed ({type(error).__name__})") from None
    native = any(needs_trust(s.kernel) for s in plan.steps)
    if native and trust is None and not is_trusted(cache_dir, digest):
        raise _refuse(
            path,
            "holds native code that is not trusted, or calls that can do what such code can",
            f'if you know where the file comes from, pass trust="{digest}", on the command line --trust',
        )
    kind = KINDS.get(str(manifest.get("device", "cpu")))
    if kind is None:
        problem = f"is for {str(manifest['device'])[:64]!r}; this Weft knows {', '.join(sorted(KINDS))}"
        raise _refuse(path, problem, "load it with the Weft that saved it, or compile the model again")
    try:
        facts = {str(k): str(v) for k, v in cast("Mapping[str, Json]", manifest.get("facts", {})).items()}
        told = manifest.get("call")
        call = None if told is None else form_of(told, len(graph.inputs), len(graph.outputs))
        made: AnyExecutable = part(kind.saved)(Read(path, graph, plan, members, manifest, facts, cache_dir, threads))
        return made, call
    except torch.OutOfMemoryError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _refuse(
            path, f"cannot be run ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})"
        ) from error


def host_saved(read: Read) -> Executable:
    """What was read and is trusted, made runnable on this CPU."""
    compiler = find_compiler()
    texts = [s.kernel for s in read.plan.steps if isinstance(s.kernel, KernelSource)]
    objects = _objects(read.path, texts, read.members, read.manifest, compiler, read.cache_dir)
    linked = Linked(
        graph=read.graph,
        plan=read.plan,
        objects=objects,
        compiler=None if isinstance(compiler, Declined) else compiler,
        cache_dir=read.cache_dir,
        threads=read.threads or int(cast("int", read.manifest.get("threads", 0))),
        facts=read.facts,
    )
    return Executable(linked)


def _read(path: Path) -> tuple[dict[str, bytes], Mapping[str, Json], str]:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            names = [i.filename for i in infos]
            if len(names) > MAX_MEMBERS or len(set(names)) != len(names):
                raise _refuse(path, "has too many members, or one twice")
            for info in infos:
                if not _NAME.fullmatch(info.filename) or info.compress_type != zipfile.ZIP_STORED:
                    raise _refuse(path, "has a member that no plan has")
                limit = MAX_JSON_BYTES if info.filename.endswith(".json") else MAX_BYTES
                if info.file_size > limit or info.file_size != info.compress_size:
                    raise _refuse(path, "has a member of impossible size")
            head = archive.read("manifest.json")
            manifest = json.loads(head)
            if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
                raise _refuse(path, "was saved by another version of Weft")
            listed = manifest["members"]
            if set(listed) != set(names) - {"manifest.json"}:
                raise _refuse(path, "does not hold what its manifest lists")
            digests = {name: str(about["sha256"]) for name, about in listed.items()}
            members = {name: archive.read(name) for name in digests}
    except FileNotFoundError:
        raise _refuse(path, "does not exist", "check the path") from None
    except (
        OSError, zipfile.BadZipFile, LookupError, ValueError, TypeError, AttributeError, RuntimeError
    ) as error:  # fmt: skip
        remedy = "check the path: `weft compile model.onnx -o NAME` writes plans"
        raise _refuse(path, f"is no readable plan ({type(error).__name__})", remedy) from None
    for name, data in members.items():
        if hashlib.sha256(data).hexdigest() != digests[name]:
            raise _refuse(path, "is damaged: a member differs from its digest", "save or copy the file again")
    return members, manifest, hashlib.sha256(head).hexdigest()


def _objects(
    path: Path,
    sources: Sequence[KernelSource],
    members: Mapping[str, bytes],
    manifest: Mapping[str, Json],
    compiler: HostCompiler | Declined,
    cache_dir: Path | None,
) -> dict[str, Path]:
    """Compiled objects: those in the file on a like machine, else compiled from the sources."""
    found: dict[str, Path] = {}
    for source in sources:
        sha = source.sha256
        if sha in found:
            continue
        data = members.get(f"objects/{sha}") if manifest.get("target") == cpu_target() else None
        if data is not None and cache_dir is not None:
            place = cache_dir / "loaded" / f"{hashlib.sha256(data).hexdigest()}.so"
            with doing_without(cache_dir):
                if not (place.is_file() and read_private(place) == data):
                    publish(place, data)
                found[sha] = place
                continue
        if isinstance(compiler, Declined):
            raise DeviceError(where=path.name, problem=f"the plan must be compiled again, but {compiler.reason}")
        found[sha] = compiler.compile(source.text, source.flags, cache_dir=cache_dir).path
    return found
