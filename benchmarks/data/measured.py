"""A table of measured kernels: problems, schedules and times of one GPU, small enough to keep beside the sources.

A tuning database names its problems by their canonical text (`weft.orchestrate.extract.canonical_text`), which leaves
out nothing that an estimate or a choice of schedules reads, except the values of small constants. So a problem can be
made again from its text, with zeros where a constant was, and the model be asked what it would have said.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from weft.device.cuda.facts import GpuFacts
from weft.errors import ArtifactError
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder, Node
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.codec import schedule_from_json, schedule_to_json
from weft.kernels.formats import Format
from weft.kernels.measurement import Verdict
from weft.kernels.source import Schedule
from weft.tune.store import Record

FORMAT = 1
BREAK_S = 10.0
"""Nothing is measured for so long between two networks: the plans are timed against their peers."""
_NODE = re.compile(r"%(\d+) = ([a-z_0-9]+)\(([^()]*)\) (.*): (\S+)")
_INPUT = re.compile(r"%(\d+) = input (\S+) (row|last)( weight)?")
_OPERAND = re.compile(r"%(\d+)")
_DTYPE = re.compile(r"<DType\.\w+: '(\w+)'>")
_TYPE = re.compile(r"((?:\d+x)*)([a-z]+\d*)")
_ATTRS = {c.__name__: c for c in vars(a).values() if isinstance(c, type) and c.__name__.endswith("Attrs")}


@dataclass(frozen=True, slots=True)
class Timed:
    """One kernel that was right."""

    schedule: Schedule
    us: float
    """Median of its samples, the gap to the next kernel included."""


@dataclass(frozen=True, slots=True)
class Case:
    """One problem and its kernels, in the order in which they were offered."""

    text: str
    """Canonical text."""
    network: str
    """For which it was first measured."""
    kernels: tuple[Timed, ...]
    tf32: bool = False
    """Whether products of f32 were allowed to round their operands to TF32."""

    @property
    def best_us(self) -> float:
        """Of the fastest kernel."""
        return min(k.us for k in self.kernels)


@dataclass(frozen=True, slots=True)
class Table:
    """What was measured on one GPU."""

    facts: GpuFacts
    cases: tuple[Case, ...]
    fusions: tuple[tuple[int, ...], ...] = ()
    """Numbers of cases: one, and those that do the same one after the other; see `benchmarks.data.fusions`."""

    def facts_of(self, case: Case) -> GpuFacts:
        """The GPU, and the numeric policy that a case was measured with."""
        return replace(self.facts, tf32=True) if case.tf32 else self.facts

    def to_json(self) -> str:
        """Lines of problems (without their numbers, operands counted backwards) and schedules stand there once each."""
        lines: dict[str, int] = {}
        schedules: dict[Schedule, int] = {}
        cases = []
        for case in self.cases:
            text = [lines.setdefault(line, len(lines)) for line in _relative(case.text)]
            kernels = [[schedules.setdefault(k.schedule, len(schedules)), round(k.us, 3)] for k in case.kernels]
            row: dict[str, Any] = {"network": case.network, "text": text, "kernels": kernels}
            cases.append(row | {"tf32": True} if case.tf32 else row)
        head = {
            "format": FORMAT,
            "facts": self.facts.to_json(),
            "lines": list(lines),
            "schedules": [schedule_to_json(s) for s in schedules],
            "fusions": self.fusions,
        }
        rows = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
        return json.dumps(head, separators=(",", ":"))[:-1] + f',"cases":[\n{rows}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> Table:
        """Inverse of `to_json`.

        Raises:
            ArtifactError: not such a table [W401].
        """
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ValueError("another format")
            lines, schedules = data["lines"], [schedule_from_json(s) for s in data["schedules"]]
            cases = [
                Case(
                    _absolute([str(lines[i]) for i in row["text"]]),
                    str(row["network"]),
                    tuple(Timed(schedules[i], float(us)) for i, us in row["kernels"]),
                    row.get("tf32", False),
                )
                for row in data["cases"]
            ]
            if not all(isinstance(case.tf32, bool) for case in cases):
                raise ValueError("a policy that is neither true nor false")
            found = [tuple(int(i) for i in numbers) for numbers in data["fusions"]]
            if any(len(numbers) < 3 or not all(0 <= i < len(cases) for i in numbers) for numbers in found):
                raise ValueError("a fusion of cases that are not there")
            return Table(GpuFacts.from_json(data["facts"]), tuple(cases), tuple(found))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            remedy = "record it again with `python -m benchmarks.model_quality --database ... --record ...`"
            raise ArtifactError(problem=f"malformed table of measurements: {error}", remedy=remedy) from None


def _turned(line: str, at: int) -> str:
    """Operands of line `at` as distances, and back again."""
    return _OPERAND.sub(lambda m: f"%{at - int(m[1])}", line)


def _relative(text: str) -> list[str]:
    """Lines of a canonical text, `%3 = add(%1, %2) : f32` as `add(%2, %1) : f32`."""
    found = []
    for at, line in enumerate(text.splitlines()):
        bare = line.partition(" = ")[2] if line.startswith("%") else line
        found.append(_turned(bare, at))
    return found


def _absolute(lines: Sequence[str]) -> str:
    """Inverse of `_relative`."""
    found = []
    for at, line in enumerate(lines):
        bare = _turned(line, at)
        found.append(bare if line.startswith(("return ", "as ")) else f"%{at} = {bare}")
    return "\n".join(found)


def table_of(records: Iterable[Record], facts: GpuFacts, networks: Sequence[str] = ()) -> Table:
    """The kernels of a database that were right, the newest measurement of each.

    `networks` names what was tuned, in order; a new one begins where nothing was measured for `BREAK_S`. Unnamed
    ones are numbered.
    """
    found: dict[tuple[str, bool], dict[Schedule, float]] = {}
    network: dict[tuple[str, bool], str] = {}
    number, last = 0, None
    for record in sorted(records, key=lambda r: r.started):
        number += last is not None and record.started - last > BREAK_S
        last = record.started
        m = record.measurement
        if m.verdict is Verdict.OK and m.samples_us:
            key = m.problem_key, json.loads(record.environment).get("allow_tf32") is True
            network.setdefault(key, networks[number] if number < len(networks) else str(number))
            found.setdefault(key, {})[m.schedule] = m.median_us
    cases = (
        Case(key[0], network[key], tuple(Timed(s, us) for s, us in kernels.items()), key[1])
        for key, kernels in found.items()
    )
    return Table(facts, tuple(cases))


def load_table(path: Path) -> Table:
    """The table in a file.

    Raises:
        ArtifactError: not such a table [W401].
    """
    return Table.from_json(path.read_text())


def problem_of(text: str) -> Problem:
    """The problem with this canonical text, small constants being zero; without its source operator.

    Raises:
        ValueError: no such text.
    """
    builder = GraphBuilder()
    ins: list[Format] = []
    outputs: list[tuple[int, Format]] = []
    for number, line in enumerate(text.splitlines()):
        if line.startswith("as "):
            continue  # the source operator, of which the text does not tell the types
        if line.startswith("return "):
            outputs = [_output(word) for word in line.removeprefix("return ").split(", ")]
            continue
        if found := _INPUT.fullmatch(line):
            at = builder.input(_type(found[2]), is_weight=found[4] is not None)
            ins.append(Format(found[3]))
        else:
            at = _node(builder, line)
        if at != number or not line.startswith(f"%{number} = "):
            raise ValueError(f"{line!r} is not number {number} of its graph")
    graph = builder.build([at for at, _ in outputs])
    return Problem(graph, text, tuple(ins), tuple(fmt for _, fmt in outputs))


def _output(word: str) -> tuple[int, Format]:
    at, fmt = word.split()
    return int(at.removeprefix("%")), Format(fmt)


def _type(text: str) -> TensorType:
    found = _TYPE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no type")
    return TensorType(DType(found[2]), tuple(int(n) for n in found[1].split("x")[:-1]))


def _node(builder: GraphBuilder, line: str) -> int:
    found = _NODE.fullmatch(line)
    if found is None:
        raise ValueError(f"{line!r} is no node")
    prim, type_, attrs = Prim(found[2]), _type(found[5]), found[4].strip()
    operands = tuple(int(x.removeprefix("%")) for x in found[3].split(", ") if x)
    if prim is Prim.CONSTANT:
        return builder.adopt_constant(attrs, np.zeros(type_.shape, type_.dtype.numpy), type_)
    return builder.adopt(Node(prim, operands, _attrs(attrs), type_), operands)


def _attrs(text: str) -> a.Attrs:
    """Attributes from their `repr`; only literals are read."""
    if not text:
        return a.NoAttrs()
    call = ast.parse(_DTYPE.sub(r"'\1'", text), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in _ATTRS:
        raise ValueError(f"{text!r} are no attributes")
    kind: Any = _ATTRS[call.func.id]
    values = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    if kind is a.CastAttrs:
        values["dtype"] = DType(values["dtype"])
    if set(values) != {f.name for f in fields(kind)}:
        raise ValueError(f"{text!r} has other fields than {kind.__name__}")
    return cast("a.Attrs", kind(**values))
