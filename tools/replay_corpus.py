"""What `tools/replay.py` compares, and how a tree makes it. Run by path, with the tree's `src` and root on PYTHONPATH.

    --collect FILE     the problems and networks of the tests of CUDA kernels, as data: they are made once, in the tree
                       that is replayed, and every tree is given the same
    --emit UNIT...     kernels and plans of each unit as this tree makes them
    --cubins FILE      the machine code of texts, as this tree's NVRTC and its options compile them: each is kept as
                       soon as it is known; with --known those alone that are

A unit is `cpu`, `network NAME`, or one of `--cases FILE`, an object of lists of cases. Texts go into a folder under
their digest, so that what two trees share is there once. Nothing is measured: kernels are priced by models of fixed
machines.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import importlib.util
import inspect
import itertools
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

GPUS = ("h200", "a100")
TESTS = {"tests/generate/cuda": "", "tests/gpu/generate/cuda": "_gpu"}
"""Where tables of cases are, and what the names of a folder's files end in here."""
MOST = 4
"""Schedules of a problem for each GPU, beside those that its test names."""
_HASHED = re.compile(r"\b([a-z])[0-9a-f]{16}")
"""Names that hold a hash of what they are made from."""

Found = dict[str, dict[str, Any]]
"""What a tree makes, by a name that is the same in both trees: `text` (its digest), `arch`, `flags`, `registers`,
`identity`, and `rest`, all else that decides what runs, field by field."""


# The cases of the tests, as data.


def collect(root: Path, limit: int) -> list[dict[str, Any]]:
    """Problems, with the schedules that stand beside them, and networks for training, of all tables of the tests."""
    from weft.kernels.codec import schedule_to_json
    from weft.tune.wire import problem_to_json

    cases: list[dict[str, Any]] = []
    seen: set[str] = set()
    files = [  # a table's own file first
        (path.stem + ending, importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts)))
        for folder, ending in TESTS.items()
        for path in sorted((root / folder).rglob("*.py"), key=lambda p: p.stem)
    ]
    for file, module in files:
        own = 0
        for name, problem, schedules in _tables(vars(module)):
            kind, data = ("problem", problem_to_json(problem)) if hasattr(problem, "graph") else (
                "training", packed(problem)
            )  # fmt: skip
            told = [schedule_to_json(s) for s in schedules]
            key = json.dumps([data, told], sort_keys=True)
            if key in seen or 0 < limit <= own:
                continue
            own += 1
            seen.add(key)
            cases.append({"name": f"{file} {name}", kind: data, "schedules": told})
    return cases


def _tables(module: Mapping[str, Any]) -> Iterator[tuple[str, Any, list[Any]]]:
    """Every problem or network in a module's tables, by its place, with the schedules next to it."""
    for name, value in module.items():
        if isinstance(value, dict | list | tuple) and not name.startswith("__"):
            yield from _inside(value, name)


def _inside(value: Any, place: str) -> Iterator[tuple[str, Any, list[Any]]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _inside(inner, f"{place} {key}")
        return
    if not isinstance(value, list | tuple):
        if (posed := _posed(value)) is not None:
            yield place, posed, []
        return
    posed_here = [p for p in map(_posed, value) if p is not None]
    alone = len(posed_here) == 1
    if alone:
        yield place, posed_here[0], [s for x in value for s in _schedules(x)]
    for number, inner in enumerate(value):
        if not alone or isinstance(inner, dict | list | tuple):
            yield from _inside(inner, f"{place} {number}")


def _posed(value: Any) -> Any:
    """A problem, a network for training, or what a helper of the tests makes a problem of; nothing for all else."""
    from tests.generate.cuda import attentions, mlps, skips

    from weft.generate.cuda.training import Network
    from weft.kernels.candidate import Problem

    if isinstance(value, Problem | Network):
        return value
    makers = {mlps.Net: mlps.mlp, skips.Skips: skips.skips, attentions.Block: attentions.block,
              attentions.Heads: attentions.linear}  # fmt: skip
    make: Any = makers.get(type(value))
    return make(value) if make else None


def _schedules(value: Any) -> list[Any]:
    """A schedule, or the schedule of a shape, alone or in a row of them."""
    from weft.kernels.source import Schedule

    if isinstance(value, Schedule):
        return [value]
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [s for x in value for s in _schedules(x)]
    if is_dataclass(value) and callable(make := getattr(value, "schedule", None)):
        return _variants(make)
    return []


def _variants(make: Any) -> list[Any]:
    """The schedules of a shape: some serve two templates, told by a name or by a flag."""
    asks = inspect.signature(make).parameters.values()
    named = ["mma" for p in asks if p.default is p.empty]
    found = [make(*named)]
    for p in asks:
        if isinstance(p.default, bool):
            with contextlib.suppress(AssertionError):  # a shape that has no such variant says so
                found.append(make(*named, **{p.name: not p.default}))
    return found


def packed(value: Any) -> Any:
    """A record of Weft's classes as JSON: dataclasses by their fields, members of enumerations by name."""
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    if isinstance(value, Enum):
        return {"class": kind, "member": value.name}
    if is_dataclass(value) and not isinstance(value, type):
        return {"class": kind, "fields": {f.name: packed(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, tuple):
        inside = [packed(v) for v in value]
        return {"class": kind, "items": inside} if hasattr(value, "_fields") else inside
    return value


def unpacked(data: Any) -> Any:
    """Inverse of `packed`, with the classes of the tree on the path, where a field may have another name."""
    if isinstance(data, list):
        return tuple(map(unpacked, data))
    if not isinstance(data, dict):
        return data
    module, _, name = data["class"].partition(":")
    assert module.startswith("weft.")
    kind = getattr(importlib.import_module(module), name)
    if "member" in data:
        return kind[data["member"]]
    if "items" in data:
        return kind(*map(unpacked, data["items"]))
    names = [f.name for f in fields(kind)]
    assert len(names) == len(data["fields"]), f"{kind} has other fields here"
    return kind(**{name: unpacked(v) for name, v in zip(names, data["fields"].values(), strict=True)})


# What a tree makes of them.


class Texts:
    """Texts by digest, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, text: str) -> str:
        """Its digest."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        path = self._folder / digest
        if not path.exists():
            path.write_bytes(zlib.compress(text.encode(), 1))
        return digest

    def read(self, digest: str) -> str:
        """The text."""
        return zlib.decompress((self._folder / digest).read_bytes()).decode()


def plain(text: str) -> str:
    """Without the hashes in names: they follow from what else is compared."""
    return _HASHED.sub(r"\1", text)


def emit(unit: str, cases: Mapping[str, list[dict[str, Any]]], texts: Texts) -> Found:
    """The kernels and plans of a unit, as the tree on the path makes them."""
    kind, _, rest = unit.partition(" ")
    if kind == "cpu":
        return emit_cpu(texts)
    if kind == "network":
        return emit_network(rest, texts)
    found: Found = {}
    for case in cases[unit]:
        try:
            found |= emit_case(case, texts)
        except Exception as error:  # a tree that cannot make it differs from one that can
            found[f"{case['name']} | made"] = {"rest": {"error": f"{type(error).__name__}: {error}"}}
    return found


def emit_case(case: Mapping[str, Any], texts: Texts) -> Found:
    """All kernels of one case, for each GPU."""
    from weft.device.cuda.facts import profile
    from weft.generate.cuda import CudaGenerator
    from weft.ir.declined import Declined
    from weft.ir.types import DType
    from weft.kernels.codec import schedule_from_json
    from weft.tune.wire import problem_from_json

    if "training" in case:
        return emit_training(case, texts)
    found: Found = {}
    maker, name = CudaGenerator(), case["name"]
    problem = problem_from_json(case["problem"])
    own = [schedule_from_json(s) for s in case["schedules"]]
    products = {problem.graph.type_of(i).dtype for i in problem.graph.inputs}
    for gpu in GPUS:
        facts = profile(gpu)
        ways = {gpu: facts} | ({f"{gpu} tf32": replace(facts, tf32=True)} if DType.F32 in products else {})
        for way, stated in ways.items():
            offered = maker.schedules(problem, stated)
            few = [] if isinstance(offered, Declined) else list(itertools.islice(offered, MOST))
            told = offered.reason if isinstance(offered, Declined) else "\n".join(map(named, few))
            found[f"{name} | schedules for {way}"] = {"rest": {"schedules": told}}
            for schedule in [*few, *own]:
                source = maker.emit(problem, schedule)
                if not isinstance(source, Declined) and source.capability > stated.capability:
                    continue  # a test's own schedule for newer machines
                found[f"{name} | {way} | {named(schedule)}"] = (
                    {"rest": {"declined": source.reason}} if isinstance(source, Declined)
                    else kernel(source, stated.arch, texts)
                )  # fmt: skip
    return found


def emit_training(case: Mapping[str, Any], texts: Texts) -> Found:
    """Gradients of a network in a few kernels, and those that stand beside products where layers are wide."""
    from weft.device.cuda.facts import profile
    from weft.generate.cuda.training import Network, gradient, layered
    from weft.ir.declined import Declined
    from weft.ir.types import DType

    found: Found = {}
    network = unpacked(case["training"])
    assert isinstance(network, Network)
    for gpu in GPUS:
        facts = profile(gpu)
        made = gradient(network, facts)
        found[f"{case['name']} | {gpu} | gradient"] = (
            {"rest": {"declined": made.reason}} if isinstance(made, Declined) else kernel(made, facts.arch, texts)
        )
        beside = layered.layered(network, facts.sms, DType.F32)
        found[f"{case['name']} | {gpu} | layered"] = kernel(beside, facts.arch, texts)
    return found


def emit_network(name: str, texts: Texts) -> Found:
    """The plan of a network by estimates for each GPU, and its distinct kernels. How, the tree's own tests know."""
    from tests.generate.cuda.networks import graph_of, plan_of

    from weft.device.cuda.facts import profile
    from weft.device.cuda.nvrtc import find_nvrtc
    from weft.ir.declined import Declined
    from weft.kernels.source import CudaSource

    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        sys.exit(f"plans for a GPU need NVRTC: {nvrtc.reason}")
    found: Found = {}
    graph = graph_of(name)
    for gpu in GPUS:
        facts, place = profile(gpu), f"{name} {gpu}"
        plan = plan_of(graph, facts, nvrtc)
        steps = [
            f"{s.problem_key}\n-> {named(s.kernel.schedule)}\n   reads {s.inputs}, writes {s.outputs}"
            for s in plan.steps
        ]
        found[f"{place} | plan"] = {"rest": {"steps": "\n\n".join(steps)}}
        for step in plan.steps:
            if isinstance(step.kernel, CudaSource):
                digest = hashlib.sha256(step.problem_key.encode()).hexdigest()[:16]
                found[f"{place} | {digest} {named(step.kernel.schedule)}"] = kernel(step.kernel, facts.arch, texts)
    return found


def named(schedule: Any) -> str:
    """A schedule by its stored names, which a tree from before some of its fields were renamed prints, too."""
    try:
        from weft.kernels.stored_names import as_stored
    except ModuleNotFoundError:
        return str(schedule)
    return str(as_stored(schedule))


def kernel(source: Any, arch: str, texts: Texts) -> dict[str, Any]:
    """A text with everything beside it that decides what runs, and what measurements of it are kept under."""
    from weft.kernels.codec import kernel_sha256

    rest = {
        key: plain(value) for key, value in _fields(source, "")
        if key not in ("text", "flags", "max_registers") and not key.startswith("schedule")
    }  # fmt: skip
    kept = {"identity": kernel_sha256(source)} if hasattr(source, "schedule") else {}  # gradients are kept under none
    return {
        "text": texts.keep(source.text),
        **kept,
        "arch": arch,
        "flags": list(getattr(source, "flags", ())),
        "registers": getattr(source, "max_registers", 0),
        "rest": rest,
    }


def _fields(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every field by its path: a field that only one tree knows can be told from one that differs."""
    if is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from _fields(getattr(value, f.name), f"{place}.{f.name}" if place else f.name)
    elif isinstance(value, tuple) and any(map(is_dataclass, value)):
        for number, inner in enumerate(value):
            yield from _fields(inner, f"{place}[{number}]")
    else:
        yield place, repr(value)


def all_kernels(problems: Any, *how: Any) -> tuple[Any, dict[str, Any]]:
    """The problems that have kernels, and these by the problem's key."""
    try:
        kernels = importlib.import_module("weft.pipeline.search.kernels")
    except ModuleNotFoundError:  # an older tree, where a problem's entry has them
        make_kernels = importlib.import_module("weft.pipeline.problems").make_kernels
        for entry in problems.entries.values():
            entry.widened = True
            make_kernels(entry, problems, *how)
        made = {key: entry.kernels for key, entry in problems.entries.items() if entry.kernels}
        problems.entries = {key: problems.entries[key] for key in made}
        return problems, made
    orders = {key: kernels.Order(task, kernels.Depth.ALL) for key, task in problems.tasks.items()}
    made = {key: pairs for key, order in orders.items() if (pairs := kernels.write(order, *how).pairs)}
    return replace(problems, tasks={key: problems.tasks[key] for key in made}), made


def emit_cpu(texts: Texts) -> Found:
    """A handful of graphs with everything in them: every kernel of every candidate, and the plan."""
    import torch
    from torch import nn
    from torch.nn import functional as F  # noqa: N812 - the name everybody uses

    from weft.device.facts import CpuFacts
    from weft.frontends.torch import import_exported
    from weft.generate.registry import generators
    from weft.ir.passes import clean_up
    from weft.kernels.source import KernelSource
    from weft.options import Options
    from weft.orchestrate.alternatives import find_alternatives
    from weft.orchestrate.enumerate import enumerate_candidates
    from weft.orchestrate.select import select
    from weft.pipeline.problems import collect

    # one file where the tree is an older one
    is_folder = getattr(importlib.util.find_spec("weft.pipeline.search"), "submodule_search_locations", None)
    prices = importlib.import_module("weft.pipeline.search" + ".prices" * bool(is_folder))

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16, affine=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.max_pool2d(F.relu(self.norm(self.conv(F.pad(x, (1, 1, 1, 1), "reflect")))), 2)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (f(x).view(1, 16, 2, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, 16, 32)
            x = self.norm(x + self.o(y))
            return x + self.down(F.gelu(self.up(x)))

    class Mobile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
            self.c = nn.Conv2d(8, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.silu(self.c(F.silu(self.b(self.a(x)))))
            return torch.cat(
                [F.interpolate(y, scale_factor=2.0), F.interpolate(y, scale_factor=2.0, mode="bilinear")], 1
            )

    torch.manual_seed(0)
    cases = {
        "norms": (Norms(), torch.randn(1, 3, 16, 16)),
        "block": (Block(), torch.randn(1, 16, 32)),
        "mobile": (Mobile(), torch.randn(1, 8, 12, 12)),
        "softmax": (nn.Softmax(-1), torch.randn(64, 100)),
    }
    facts, options = CpuFacts(simd_bytes=64, threads=2, cores=2), Options()
    found: Found = {}
    for name, (module, x) in cases.items():
        with torch.no_grad():
            program = torch.export.export(module.eval(), (x,), strict=False)
        alternatives = find_alternatives(clean_up(import_exported(program).graph).graph)
        graph = alternatives.graph
        problems = collect(graph, enumerate_candidates(graph, None, alternatives).candidates, alternatives, facts)
        problems, made = all_kernels(problems, generators(), facts, options)
        for problem_key, pairs in made.items():
            for schedule, source in pairs:
                key = f"cpu {name} | {schedule}\n{problem_key}"
                text = source.text if isinstance(source, KernelSource) else repr(source)
                found[key] = {"text": texts.keep(text), "rest": {}}
        offers, owners = prices.priced_offers(problems, prices.Known())
        chosen = select(graph, offers, alternatives=alternatives, gap=0.0, plans=1)[0].chosen
        found[f"cpu {name} | plan"] = {"rest": {"steps": "\n\n".join(owners[i].problem.key for i in chosen)}}
    return found


# What a tree compiles.


class Codes:
    """Digests of machine code by what was compiled, in a file that grows by a line with each.

    A run that ends in between has lost nothing, and several processes may write it at once.
    """

    def __init__(self, cache: Path, version: str) -> None:
        decides = json.dumps([version, Path(str(reader().__file__)).read_text()])
        self._path = cache / "codes" / f"{hashlib.sha256(decides.encode()).hexdigest()[:16]}.jsonl"
        self._known: dict[str, dict[str, str] | str] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in self._path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # cut off where a process was ended
                    self._known |= json.loads(line)

    def get(self, key: str) -> dict[str, str] | str | None:
        """The digest of each entry, or why there is none; nothing where it was never compiled."""
        return self._known.get(key)

    def put(self, key: str, code: dict[str, str] | str) -> None:
        """Keep one."""
        self._known[key] = code
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
            file.write(f"\n{json.dumps({key: code})}\n".encode())  # the first ends what was cut off


def cubins(
    jobs: list[dict[str, Any]], texts: Texts, threads: int, cache: Path, *, known: bool = False
) -> list[dict[str, str] | str | None]:
    """The digest of each entry's machine code, by its name, or why there is none.

    Nothing where only what is `known` is asked for and it is not.
    """
    from weft.device.cuda.nvrtc import find_nvrtc
    from weft.errors import ToolchainError
    from weft.ir.declined import Declined

    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        sys.exit(f"cubins need NVRTC: {nvrtc.reason}")
    entries, codes = reader().entries, Codes(cache, nvrtc.version)

    def one(job: dict[str, Any]) -> dict[str, str] | str | None:
        text = plain(texts.read(job["text"]))
        flags, how = tuple(job["flags"]), {"arch": job["arch"], "max_registers": job["registers"]}
        key = hashlib.sha256(f"{nvrtc.identity(flags, **how)}\0{text}".encode()).hexdigest()
        code = codes.get(key)
        if code is None and not known:
            try:
                made = nvrtc.compile(text, flags=flags, timeout_s=600.0, **how)
                code = dict(entries(made.path.read_bytes()))
                made.path.unlink(missing_ok=True)  # what counts is read, and thousands are compiled
            except ToolchainError as error:
                code = f"refused: {str(error).splitlines()[0]}"
            codes.put(key, code)
        return code

    with ThreadPoolExecutor(threads or None) as pool:
        return list(pool.map(one, jobs))


def reader() -> ModuleType:
    """This tree's reader of cubins, whatever tree is on the path: two are compared by one."""
    path = Path(__file__).parent.parent / "src/weft/device/cuda/cubin.py"
    spec = importlib.util.spec_from_file_location("replay_cubin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """One of the three, as JSON in the last line of the output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path)
    parser.add_argument("--emit", nargs="+", metavar="UNIT")
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--known", action="store_true")
    parser.add_argument("--cases", type=Path, default=Path("cases.json"))
    parser.add_argument("--texts", type=Path, default=Path("texts"))
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    weft = importlib.util.find_spec("weft")
    if weft is None or Path.cwd() / "src" not in Path(str(weft.origin)).resolve().parents:
        sys.exit(f"there is no Weft in {Path.cwd() / 'src'}")
    told: Any
    if given.collect:
        found = collect(Path(__file__).parent.parent, given.limit)
        given.collect.write_text(json.dumps(found))
        told = len(found)
    elif given.cubins:
        jobs = json.loads(given.cubins.read_text())
        told = cubins(jobs, Texts(given.texts), given.threads, given.cache, known=given.known)
    else:
        cases = json.loads(given.cases.read_text()) if given.cases.exists() else {}
        told = {unit: emit(unit, cases, Texts(given.texts)) for unit in given.emit}
    print(base64.b64encode(zlib.compress(json.dumps(told).encode())).decode())


if __name__ == "__main__":
    main()
