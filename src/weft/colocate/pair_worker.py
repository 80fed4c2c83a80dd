"""The process that may die: verifies and times fused kernels of one pair, as it is asked to.

Started as `python -m weft.colocate.pair_worker`. A line of JSON is a request, a line of JSON its answer: the first says
which files the pair is of (they are read again here, and must give the kernels that were compiled), each further one a
shape and its machine code. What a kernel leaves is compared with what both kernels leave by themselves, with nothing to
draw, stopped, and at splits of the job (`weft.tune.cuda_pair`); then it is timed beside its peers.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TextIO, final

from weft.colocate.contents import contents
from weft.colocate.side import Buffer, Constant, Side, Value, shared_memory, side
from weft.device.cuda.facts import GpuFacts, profile
from weft.errors import WeftError
from weft.generate.bind import Addresses, BoundCuda, CudaDriver, CudaModule, Encode, Prepared, resolved
from weft.generate.bind_fused import BoundFused
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.fused import fuse
from weft.generate.cuda.role.persistent import persistent
from weft.ir.declined import Declined
from weft.kernels.codec import Json
from weft.kernels.colocation import BYTES, FusedSource, FusionShape
from weft.kernels.dataclass_json import from_json
from weft.kernels.source import CudaSource
from weft.tune import cuda_pair
from weft.tune.cuda_pair import Machine, Memory, Pair, PairTimes, Wanted, launches_for, measure, rate
from weft.tune.keys import digest
from weft.tune.pairs import fused_digest

DRAIN_CTAS = 8
"""Of a multiprocessor, for what fused launches leave of the job."""
WORD_BYTES = 8
"""Of an argument, at most."""
LAUNCHES = 4
"""In which it is seen how many blocks one runs."""
LEAST_BLOCKS = 0.01
"""In a launch: with fewer the most launches are run."""
ENTRY, REST = "w_fused", "w_rest"


class PairMachine(Machine, Protocol):
    """A GPU that also has memory to give, and parts."""

    def room(self, size: int) -> int:
        """Address of so much memory."""

    def place(self, buffer: Buffer) -> tuple[int, Memory]:
        """Address of a buffer, and its memory with the guards around it."""

    def parts(
        self, first: Sequence[Prepared], second: Sequence[Prepared], launches: int
    ) -> dict[str, Callable[[int], None]]:
        """A further peer, by name; empty: there is none."""


class Loaded(CudaModule, Protocol):
    """A cubin whose variables can be filled."""

    def variable(self, name: str) -> tuple[int, int]:
        """(address, bytes)."""


@dataclass(frozen=True, slots=True)
class Code:
    """Machine code of one kernel."""

    path: Path
    entry: str = ""
    """As the compiler calls it."""
    symbols: tuple[str, ...] = ()
    """Of its constants, as the compiler calls them, those of LC first."""


@final
@dataclass(slots=True)
class Driver:
    """Loads each cubin once."""

    load: Callable[[Path], Loaded]
    encode: Encode
    modules: dict[Path, Loaded] = field(default_factory=dict)

    def module(self, path: Path) -> Loaded:
        """Of a cubin."""
        if path not in self.modules:
            self.modules[path] = self.load(path)
        return self.modules[path]

    @property
    def bound(self) -> CudaDriver:
        """As what binds kernels takes it."""
        return CudaDriver(self.module, self.encode)


def source_of_ours(one: Side) -> CudaSource | None:
    """A kernel by itself as its role in a kernel of its own; None: it runs as it stands in its file.

    Products are nothing else. A file's kernel is one only where it is passed values that a launch has no words for.
    """
    wide = any(isinstance(a, Value) and len(a.data) > WORD_BYTES for a in one.arguments)
    return solo(one.source, f"w_{one.name}") if wide or one.source.schedule.generator != "foreign" else None


def bound_plain(one: Side, module: CudaModule, entry: str, at: Addresses, encode: Encode) -> Prepared:
    """A file's kernel by itself as it stands there, bound to addresses."""
    function = module.function(entry)
    function.prepare(one.shared_bytes, one.cluster)
    arguments = [
        int.from_bytes(a.data, "little") if isinstance(a, Value) else resolved(a, at, encode) for a in one.arguments
    ]
    return function.bind(
        one.grid, one.block, arguments, shared_bytes=one.shared_bytes, cluster=one.cluster, dependent=False
    ).launch


def drain_of(sides: Sequence[Side], facts: GpuFacts) -> FusedSource | Declined:
    """The job alone, as what ends it behind fused launches."""
    return persistent([s.source for s in sides[1:]], ctas=DRAIN_CTAS * facts.sms, entry=REST, facts=facts)


@final
class Trials:
    """A pair in the memory of a GPU, with the two kernels by themselves."""

    def __init__(
        self, sides: Sequence[Side], facts: GpuFacts, machine: PairMachine, driver: Driver, codes: Mapping[str, Code]
    ) -> None:
        """`codes`: of each side by its name, and of `rest`.

        Raises:
            ValueError: by themselves the kernels are no proof, or the job alone leaves something else.
            WeftError: a kernel cannot be loaded, or there is no room.
        """
        self.sides, self.facts, self.machine, self.driver = sides, facts, machine, driver
        buffers, means = shared_memory(tuple(sides))
        placed = {name: machine.place(b) for name, b in buffers.items()}
        self._at = [_addresses(one, placed, means) for one in sides]
        self.counter, self.fresh = machine.room(BYTES), machine.room(BYTES)
        alone = [self._alone(one, codes[one.name], at) for one, at in zip(sides, self._at, strict=True)]
        rest = drain_of(sides, facts)
        if isinstance(rest, Declined):
            raise ValueError(rest.reason)  # noqa: TRY004 - it is the job
        drain = self._bound(rest, codes["rest"], [c for s in sides[1:] for c in s.constants])
        memory = {g: tuple(m for n, (_, m) in placed.items() if n.startswith(f"{g}_")) for g in ("lc", "be")}
        self.lc = cuda_pair.Side((alone[0],), memory["lc"])
        self.be = cuda_pair.Side(tuple(alone[1:]), memory["be"])
        self._base = Pair(self.lc, self.be, _nothing, drain, self.counter, self.fresh, rest.stages)
        want = cuda_pair.alone(machine, self._base)
        if isinstance(want, str):
            raise ValueError(want)  # noqa: TRY004 - it is the pair
        if wrong := cuda_pair.verify_drain(machine, self._base, want):
            raise ValueError(wrong)
        self._want: Wanted = want
        self._right: dict[str, Pair] = {}

    def trial(self, shape: FusionShape, kernel: str, code: Code, rounds: int) -> PairTimes | str:
        """Its times, or what is wrong with it."""
        pair = self._right.get(kernel)
        if pair is None:
            source = fuse(
                self.sides[0].source, [s.source for s in self.sides[1:]], shape, entry=ENTRY, facts=self.facts
            )
            if isinstance(source, Declined):
                return source.reason
            if fused_digest(source) != kernel:
                return "its sources are others than those that were compiled"
            constants = [c for s in self.sides for c in s.constants]
            pair = replace(self._base, fused=self._bound(source, code, constants), stages=source.stages)
            if wrong := cuda_pair.verify(self.machine, pair, self._want):
                return wrong
            self._right[kernel] = pair
        found = rate(self.machine, pair, LAUNCHES, 3)
        if found.blocks * LAUNCHES >= pair.total:  # the job was over before
            found = rate(self.machine, pair, 1, 3)
        n = launches_for(pair.total, max(found.blocks, LEAST_BLOCKS))
        times = measure(self.machine, pair, n, rounds, self.machine.parts(self.lc.alone, self.be.alone, n))
        return times if times.drained else f"the job had not run whole after {n} launches and what was left"

    def _alone(self, one: Side, code: Code, at: Addresses) -> Prepared:
        self._fill(code, one.constants)
        if (own := source_of_ours(one)) is not None:
            return BoundCuda(own, code.path, driver=self.driver.bound).prepare(at)
        return bound_plain(one, self.driver.module(code.path), code.entry, at, self.driver.encode)

    def _bound(self, source: FusedSource, code: Code, constants: Sequence[Constant]) -> Prepared:
        bound = BoundFused(source, code.path, driver=self.driver.bound)
        self._fill(code, constants)
        return bound.prepare(self._at, self.counter)

    def _fill(self, code: Code, constants: Sequence[Constant]) -> None:
        for symbol, constant in zip(code.symbols, constants, strict=True):
            address, size = self.driver.module(code.path).variable(symbol)
            data = contents(constant.data)
            if len(data) > size:
                raise ValueError(f"{constant.name}: {size} bytes, and {len(data)} to be filled in")
            self.machine.write(address, data)


def _nothing(stream: int) -> None:
    """No kernel."""


def _addresses(
    one: Side, placed: Mapping[str, tuple[int, Memory]], means: Mapping[tuple[str, str, int], str]
) -> Addresses:
    def of(kind: str) -> list[int]:
        count = sum(k == kind for k, _ in one.memory)
        return [placed[means[one.name, kind, i]][0] for i in range(count)]

    return Addresses(of("in"), of("out"))


def text_digest(sides: Sequence[Side]) -> str:
    """Of the kernels by themselves, as both processes have read them."""
    return digest("\0".join(x for s in sides for x in (solo(s.source, f"w_{s.name}").sha256, s.text)))


def sides_of(asked: Mapping[str, Any]) -> tuple[Side, ...]:
    """The kernels that a request names."""
    return tuple(
        side(Path(path), name, profile("h200"), small=bool(asked["small"]), changes=asked["changes"].get(name, {}))
        for name, path in asked["kernels"]
    )


def answer(trials: Trials, request: Mapping[str, Any]) -> dict[str, Json]:
    """Of a request for a trial."""
    code = Code(Path(request["path"]), ENTRY, tuple(request["symbols"]))
    shape = from_json(FusionShape, request["shape"])
    try:
        found = trials.trial(shape, str(request["kernel"]), code, int(request["rounds"]))
    except (WeftError, ValueError) as error:
        return {"event": "lost", "reason": f"{type(error).__name__}: {error}"[:1000]}
    if isinstance(found, str):
        return {"event": "refused", "reason": found[:1000]}
    return {
        "event": "times", "launches": found.launches, "lc_us": found.lc_us, "be_us": found.be_us,
        "peers": dict(found.peers), "fused_us": found.fused_us, "inside_us": found.inside_us,
        "idle_us": found.idle_us, "inside_blocks": found.inside_blocks, "drained": found.drained,
    }  # fmt: skip


def serve(
    requests: TextIO, say: Callable[[Mapping[str, Json]], None], make: Callable[[Mapping[str, Any]], Trials]
) -> None:
    """Answer requests until there are no more. An error of the GPU ends it: nothing can be believed after one."""
    first = requests.readline()
    if not first:
        return
    try:
        trials = make(json.loads(first))
    except ValueError as error:
        say({"event": "declined", "reason": str(error)[:1000]})
        return
    except WeftError as error:
        say({"event": "failed", "reason": str(error)[:1000]})
        return
    say({"event": "ready"})
    for line in requests:
        found = answer(trials, json.loads(line))
        say(found)
        if found["event"] == "lost":
            os._exit(4)  # destructors would call a driver that answers no more


def trials_of(asked: Mapping[str, Any], gpu: Callable[[], tuple[PairMachine, Driver]]) -> Trials:
    """The pair of a first request.

    Raises:
        ValueError: see `Trials`; or the files are others than they were.
        WeftError: see `Trials`.
    """
    sides = sides_of(asked)
    if text_digest(sides) != asked["digest"]:
        raise ValueError("a file has changed meanwhile")
    codes = {name: Code(Path(path), entry, tuple(more)) for name, (path, entry, *more) in asked["codes"].items()}
    return Trials(sides, GpuFacts.from_json(asked["facts"]), *gpu(), codes)


def made(asked: Mapping[str, Any], held: ExitStack) -> Trials:
    """The pair of a first request on GPU 0.

    Raises:
        ValueError: see `Trials`; or the files are others than they were.
        WeftError: there is no GPU, or it does not work.
    """
    from weft.colocate.pair_machine import PairMachine as Gpu
    from weft.device.cuda.driver import Module, encode_tensor_map, primary_context

    def gpu() -> tuple[PairMachine, Driver]:
        held.enter_context(primary_context())
        return Gpu(held), Driver(Module, encode_tensor_map)

    return trials_of(asked, gpu)


def main() -> None:
    """Entry point of the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(message: Mapping[str, Json]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    with ExitStack() as held:
        serve(sys.stdin, say, lambda asked: made(asked, held))


if __name__ == "__main__":
    main()
