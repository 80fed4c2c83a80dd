"""How many kernels of public suites can be fused unedited: Parboil and Rodinia at a pinned commit.

    python -m benchmarks.fetch_suites --folder DIR       fetches what DIR lacks, and records every kernel

Nothing of the suites is part of this repository. A kernel is every `__global__` function of every `.cu` file that has
a definition of its own; its launch is assumed (128 threads, 4 blocks), as the hosts' are in their code, and templates
get the arguments of the table below. For each kernel: does NVRTC take it at all (its source without host code, headers
of the system empty)? If so, is it fused with a kernel of ours of 256 threads, for sm_90a, or refused, and why?
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.record import Record
from weft.device.cuda.confined import ConfinedJob, ConfinedResult, compile_confined
from weft.device.cuda.facts import profile
from weft.generate.cuda.foreign.cut import alone as original
from weft.generate.cuda.foreign.cut import cut
from weft.generate.cuda.foreign.declared import DeclaredKernel, kernels
from weft.generate.cuda.foreign.manifest import Data, KernelParameter, Manifest
from weft.generate.cuda.foreign.read import ForeignRole, read
from weft.generate.cuda.foreign.types import KNOWN
from weft.generate.cuda.foreign.unit import Unit, unit
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.generate.cuda.role.fused import fuse, shapes
from weft.generate.cuda.role.role import DeviceRole, Parameter, RoleSource
from weft.ir.declined import Declined
from weft.kernels.colocation import FusedSource
from weft.kernels.source import Pointer, Schedule

SUITES = {
    "parboil": ("https://github.com/abduld/Parboil", "a4c63da28f45699e9a274cbc49af3e067162aa2b", "benchmarks"),
    "rodinia": ("https://github.com/yuhc/gpu-rodinia", "9c10d3ea16ddba2ba057cc3951a9efc4c2cc18a4", "cuda"),
}
"""Name -> repository, commit, folder of the sources."""
INCLUDES = ("common/include", "common")
ENTRIES = {
    "prescan": "prescan<true, false>",
    "fdwt53Kernel": "fdwt53Kernel<64, 8>",
    "rdwt53Kernel": "rdwt53Kernel<64, 8>",
    "c_CopySrcToComponents": "c_CopySrcToComponents<int>",
    "c_CopySrcToComponent": "c_CopySrcToComponent<int>",
}
"""Arguments of templates."""
ARCH = "sm_90a"
_ELEMENTS = 1024
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


def fetch(name: str, folder: Path) -> Path:
    """The suite at its commit beneath the folder; fetched if it is not there."""
    url, commit, _ = SUITES[name]
    home = folder / name
    if not home.is_dir():
        home.mkdir(parents=True)
        for command in (
            ["git", "init", "-q"],
            ["git", "fetch", "-q", "--depth", "1", url, commit],
            ["git", "checkout", "-q", "FETCH_HEAD"],
        ):
            subprocess.run(command, cwd=home, check=True)
    return home


def found(home: Path, within: str) -> Iterator[tuple[Path, Manifest, Unit | Declined]]:
    """Every `.cu` file with a kernel."""
    for path in sorted((home / within).rglob("*.cu")):
        if "__global__" in path.read_text(encoding="utf-8", errors="replace"):
            places = [path.parent, path.parent.parent, *(home / x for x in INCLUDES)]
            include = tuple(p.resolve() for p in places if p.is_dir())
            manifest = Manifest(home / "kernel.toml", path.resolve(), "", (4, 1, 1), (128, 1, 1), (), include=include)
            yield path, manifest, unit(manifest)


def judged(manifest: Manifest, text: Unit, kernel: DeclaredKernel) -> dict[str, object]:
    """What becomes of one kernel."""
    name = kernel.name
    entry = ENTRIES.get(name, name) if kernel.template else name
    base = Manifest(manifest.path, manifest.source, entry, manifest.grid, manifest.block, (), include=manifest.include)
    plain = original(text, entry)
    if isinstance(plain, Declined):
        return {"state": "refused", "reason": plain.reason}
    unknown = sorted({p.type for p in kernel.parameters if p.type not in KNOWN and p.type != "void"})
    asked = "".join(f'asm volatile("// size {i} %0" :: "n"((int)sizeof({t})));\n' for i, t in enumerate(unknown))
    whole_text = f'{plain}\nextern "C" __global__ void w_sizes() {{ {asked} }}\n'
    (taken,) = compile_confined([ConfinedJob(whole_text, "compute_90a", (entry,))])
    if isinstance(taken, Declined):
        first = re.search(r"error: ([^\n]*)", taken.reason)
        return {"state": "not taken by NVRTC", "reason": first[1] if first else taken.reason[:200]}
    sizes = {unknown[int(i)]: int(n) for i, n in re.findall(rb"// size (\d+) (\d+)", taken.code)}
    part = cut(text, entry)
    if isinstance(part, Declined):
        return {"state": "refused", "reason": part.reason}
    described = []
    for p in kernel.parameters:
        if p.pointers:
            element = KNOWN.get(p.type, KNOWN["unsigned char"])
            kind = "char" if p.type == "void" else p.type
            data = Data(p.name, kind, element, sizes.get(p.type, 1), (_ELEMENTS,), "zeros")
            described.append(KernelParameter(p.name, kind, "inout", data, p.name))
        elif p.type in KNOWN:
            described.append(KernelParameter(p.name, p.type, "scalar", values=(0,) * KNOWN[p.type].components))
        else:
            return {"state": "refused", "reason": f"{p.name}: a struct that is passed by value"}
    state = tuple(
        n
        for x in part.plain
        if x.kind == "variable" and "__device__" in x.qualifiers and not {"const", "__constant__"} & x.qualifiers
        for n in x.names
    )
    whole = Manifest(
        base.path, base.source, entry, base.grid, base.block, tuple(described), (), state, include=base.include
    )
    began = time.perf_counter()
    role = read(whole)
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
        reason = made.reason[:300]
    return {"state": "refused", "reason": reason}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("suites"), help="where the suites lie, or are fetched to")
    parser.add_argument("--suite", choices=sorted(SUITES), action="append", help="one or more; all if left out")
    options = parser.parse_args()
    record = Record("cpu", "foreign-kernels")
    for name in options.suite or sorted(SUITES):
        home = fetch(name, options.folder)
        seen: Counter[str] = Counter()
        for path, manifest, text in found(home, SUITES[name][2]):
            if isinstance(text, Declined):
                seen["refused"] += 1
                case = f"{name}/{path.relative_to(home)}"
                record.add({"record": "case", "suite": "foreign-kernels", "case": case, "state": "refused",
                            "reason": text.reason})  # fmt: skip
                continue
            own = [k for k in kernels(text) if text.places[k.line - 1][0] == str(path.relative_to(home))]
            for kernel in own:
                row = judged(manifest, text, kernel)
                seen[str(row["state"])] += 1
                case = f"{name}/{path.relative_to(home)}:{kernel.name}"
                record.add({"record": "case", "suite": "foreign-kernels", "case": case, **row})
        taken = seen["fused"] + seen["refused"]
        record.add(
            {
                "record": "summary", "suite": f"foreign-kernels-{name}", "commit": SUITES[name][1], **seen,
                "of_those_that_nvrtc_takes": round(seen["fused"] / taken, 4) if taken else None,
            }
        )  # fmt: skip
        sys.stdout.flush()
    record.close()


if __name__ == "__main__":
    main()
