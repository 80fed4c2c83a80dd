"""How many kernels of public suites can be fused unedited: Parboil, Rodinia, PolyBench-GPU and HeCBench.

    python -m benchmarks.fetch_suites --folder DIR                     fetches what DIR lacks, and records every kernel
    python -m benchmarks.fetch_suites --mirror rodinia=DIR.git ...     takes a suite from a git directory instead

Nothing of the suites is part of this repository; which of their files are looked at stands in `cases/public_suites.py`.
A kernel is every `__global__` function of every `.cu` file and of what it includes; launch and arguments are assumed
(`cases/assumed_launches.py`). For each kernel: does NVRTC take it at all (its source without host code, headers of the
system empty)? If so, is it fused with a kernel of ours of 256 threads, for sm_90a, or refused, and why?
"""

from __future__ import annotations

import argparse
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cases.assumed_launches import BLOCK, GRID, described, entries, taken
from benchmarks.cases.public_suites import SUITES, fetch, files
from benchmarks.harness.record import Record
from weft.device.cuda.confined import ConfinedJob, ConfinedResult, compile_confined
from weft.device.cuda.facts import profile
from weft.generate.cuda.foreign.cut import alone as original
from weft.generate.cuda.foreign.cut import cut
from weft.generate.cuda.foreign.declared import DeclaredKernel, kernels
from weft.generate.cuda.foreign.manifest import Manifest, ManifestError
from weft.generate.cuda.foreign.manifest import read as read_manifest
from weft.generate.cuda.foreign.read import ForeignRole, read
from weft.generate.cuda.foreign.unit import Unit, unit
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.generate.cuda.role.fused import fuse, shapes
from weft.generate.cuda.role.role import DeviceRole, Parameter, RoleSource
from weft.ir.declined import Declined
from weft.kernels.colocation import FusedSource
from weft.kernels.source import Pointer, Schedule

ARCH = "sm_90a"
SECONDS = 120
"""For one kernel; one that takes longer is refused."""
_OF_CUDA = re.compile(
    r"(?:cuda_(?!runtime)|cub/|cub$|thrust/|cooperative_groups|curand|mma|cu(?:blas|sparse|fft)|cuda/|nv/)\S*"
)
_BODY = """const unsigned i = role.block_x() * 256u + role.thread();
float v = x[i];
for (int k = 0; k < 16; ++k) v = fmaf(v, 0.75f, 1.0f);
y[i] = v;"""


def host() -> RoleSource:
    """A latency-critical kernel of 256 threads."""
    parameters = (
        Parameter("x", Pointer("in", 0), "const float* __restrict__"),
        Parameter("y", Pointer("out", 0), "float* __restrict__"),
    )
    return RoleSource(Schedule("suite", ()), (prelude(),), (DeviceRole(256, _BODY, parameters, (132, 1, 1)),))


def found(name: str, home: Path) -> Iterator[tuple[Path, Manifest, Unit | Declined]]:
    """Every `.cu` file with a kernel, or with one in what it includes."""
    for path in files(name, home):
        places = [path.parent, path.parent.parent, *(home / x for x in SUITES[name].include)]
        include = tuple(p.resolve() for p in places if p.is_dir())
        manifest = Manifest(home / "kernel.toml", path.resolve(), "", GRID, BLOCK, (), include=include)
        text = unit(manifest)
        if isinstance(text, Declined) or "__global__" in text.text:
            yield path, manifest, text


def judged(manifest: Manifest, text: Unit, kernel: DeclaredKernel) -> dict[str, object]:
    """What becomes of one kernel."""
    plain, reason = {}, ""
    for entry, _ in entries(text, kernel):
        one = original(text, entry)
        if isinstance(one, Declined):
            reason = one.reason
        else:
            plain[entry] = one
    if not plain:
        return {"state": "refused", "reason": reason}
    known = taken(text, kernel, plain)
    if isinstance(known, Declined):
        wanted = [h for h in text.empty if _OF_CUDA.fullmatch(h)]
        return {"state": "not taken by NVRTC", "reason": known.reason, **({"headers": wanted} if wanted else {})}
    part = cut(text, known.entry)
    if isinstance(part, Declined):
        return {"state": "refused", "reason": part.reason}
    told = described(part, kernel, manifest.root, manifest, known)
    if isinstance(told, Declined):
        return {"state": "refused", "reason": told.reason}
    manifest.path.write_text(told)
    began = time.perf_counter()
    try:
        role = read(read_manifest(manifest.path))
    except ManifestError as error:
        return {"state": "refused", "reason": str(error).splitlines()[0]}
    if isinstance(role, Declined):
        return {"state": "refused", "reason": role.reason}
    return {**fused(role), "seconds": round(time.perf_counter() - began, 2), "barriers": role.form}


def fused(role: ForeignRole) -> dict[str, object]:
    """The kernel beside ours, compiled."""
    lc, facts = host(), profile("h200")
    reason = "no shape holds both"
    for shape in shapes(lc, [role.source], facts)[:1]:
        source = fuse(lc, [role.source], shape, facts=facts)
        if not isinstance(source, FusedSource):
            reason = source.reason
            continue
        (made,) = compile_confined([ConfinedJob(source.text, ARCH)])
        if isinstance(made, ConfinedResult):
            own = dict(made.resources)[source.entry]
            return {"state": "fused", "registers": own.registers, "spilled_bytes": own.spill_stores + own.spill_loads}
        error = re.search(r"error[^:\n]*: ([^\n]*)", made.reason)
        reason = f"the fused kernel: {error[1] if error else made.reason[:300]}"
    return {"state": "refused", "reason": reason}


class _OverError(Exception):
    """A kernel takes too long."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises `_OverError` in what takes longer."""

    def over(_: int, __: object) -> None:
        raise _OverError

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def looked_at(name: str, home: Path, record: Record, only: str) -> set[str]:
    """Record every kernel of a suite; its cases.

    A kernel of a header is tried in the files that include it until NVRTC takes it.
    """
    states: dict[str, str] = {}
    for path, manifest, text in found(name, home):
        if only not in str(path.relative_to(home)):
            continue
        if isinstance(text, Declined):
            if "__global__" in path.read_text(encoding="utf-8", errors="replace"):
                case = f"{name}/{path.relative_to(home)}"
                states[case] = "refused"
                record.add({"record": "case", "suite": "foreign-kernels", "case": case, "state": "refused",
                            "reason": text.reason})  # fmt: skip
            continue
        for kernel in kernels(text):
            place = text.places[kernel.line - 1][0]
            case = f"{name}/{place}:{kernel.name}"
            if states.get(case, "not taken by NVRTC") != "not taken by NVRTC":
                continue
            try:
                with within(SECONDS):
                    row = judged(manifest, text, kernel)
            except _OverError:
                row = {"state": "refused", "reason": f"{place}: more than {SECONDS} s"}
            states[case] = str(row["state"])
            record.add({"record": "case", "suite": "foreign-kernels", "case": case, **row})
    return set(states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("suites"), help="where the suites lie, or are fetched to")
    parser.add_argument("--suite", choices=sorted(SUITES), action="append", help="one or more; all if left out")
    parser.add_argument(
        "--mirror", action="append", default=[], metavar="SUITE=DIR", help="a git directory to take it from"
    )
    parser.add_argument("--only", default="", help="files whose path holds this; rows of others stay")
    options = parser.parse_args()
    mirrors = dict(x.partition("=")[::2] for x in options.mirror)
    if unknown := set(mirrors) - set(SUITES):
        parser.error(f"--mirror: {', '.join(sorted(unknown))}: none of {', '.join(SUITES)}")
    record = Record("cpu", "foreign-kernels")
    for name in options.suite or list(SUITES):
        home = fetch(name, options.folder, Path(mirrors[name]) if name in mirrors else None)
        old = {c for c in record.known() if c.startswith(f"{name}/")}
        states = looked_at(name, home, record, options.only)
        if not options.only:
            record.forget(*(old - states))
    for name, suite in SUITES.items():
        seen = Counter(str(x["state"]) for x in record.cases if str(x["case"]).startswith(f"{name}/"))
        given = seen["fused"] + seen["refused"]
        if seen:
            record.add(
                {
                    "record": "summary", "suite": f"foreign-kernels-{name}", "commit": suite.commit, **seen,
                    "of_those_that_nvrtc_takes": round(seen["fused"] / given, 4) if given else None,
                }
            )  # fmt: skip
    record.close()


if __name__ == "__main__":
    main()
