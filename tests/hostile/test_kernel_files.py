"""Files of kernels that are made to do harm: each is refused by name or ended, within bounds of time and memory."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.generate.cuda.foreign.sources import HEAD, IN_OUT, KERNEL, manifest
from tests.slow import few

from weft.device.cuda.confined import ConfinedJob, ConfinedResult, compile_confined
from weft.generate.cuda.foreign import patience
from weft.generate.cuda.foreign.manifest import ManifestError
from weft.generate.cuda.foreign.read import ForeignRole, read
from weft.ir.declined import Declined

pytestmark = pytest.mark.usefixtures("compilers_at_work")

K = KERNEL
MEMORY, SECONDS = 2 << 30, 8.0


def bounded(jobs: Sequence[ConfinedJob]) -> list[ConfinedResult | Declined]:
    """The compiler with less time and memory than it is given otherwise."""
    return compile_confined(jobs, memory_bytes=MEMORY, timeout_s=SECONDS)


def refused(folder: Path, source: str) -> str:
    found = read(manifest(folder, source), compiler=bounded)
    assert isinstance(found, Declined)
    assert str(folder) not in found.reason and found.reason.isprintable() and len(found.reason) < 600
    return found.reason


BOMBS = {
    "an initialiser": K % "static const int a[1 << 30] = {1}; x[0] = a[(int)x[1]];",
    "a macro that doubles": "#define A0 x[0] += 1;\n"
    + "".join(f"#define A{i} A{i - 1} A{i - 1}\n" for i in range(1, 40))
    + K % "A39;",
    "templates that double": "template <int N, long long M> struct F "
    "{ static const int v = F<N - 1, 2 * M>::v + F<N - 1, 2 * M + 1>::v; };\n"
    "template <long long M> struct F<0, M> { static const int v = 1; };\n" + K % "x[0] = F<40, 1>::v;",
}


@pytest.mark.parametrize("name", few(BOMBS, 1))
def test_a_compiler_that_is_driven_too_far_is_ended(name: str, tmp_path: Path) -> None:
    reason = refused(tmp_path, BOMBS[name])
    assert re.search(r"k\.cu: .*(took more than|ran out of memory|out of memory)|the compiler refuses it", reason), (
        reason
    )


INCLUDED = {
    "a device": ('#include "/dev/zero"\n', r'k\.cu:1: #include "/dev/zero" leaves the folder'),
    "a device by its path from here": (
        '#include "../../../../../../../../dev/zero"\n',
        r"k\.cu:1: .* leaves the folder",
    ),
    "a link to a device": ('#include "zero.h"\n', r'k\.cu:1: #include "zero\.h" leaves the folder'),
    "a linked folder": ('#include "etc/passwd"\n', r'k\.cu:1: #include "etc/passwd" leaves the folder'),
    "the process itself": ('#include "/proc/self/environ"\n', r"k\.cu:1: .* leaves the folder"),
    "zero bytes": ('#include "nul.h"\n', r"nul\.h: holds zero bytes"),
    "100 MB": ('#include "large.h"\n', r"large\.h: over 4194304 bytes"),
    "files that double": ('#include "a0.h"\n', r"a\d+\.h: over 4096 files are included"),
    "bytes of a file": ('const char s[] = {\n#embed "/etc/passwd"\n};\n', r"k\.cu:2: #embed is not taken"),
    "a layout": ("#pragma pack(1)\n", r"k\.cu:1: #pragma pack\(1\): only"),
    "a macro that comes back": ('#pragma push_macro("threadIdx")\n', r"k\.cu:1: #pragma push_macro"),
}


@pytest.mark.parametrize("name", INCLUDED)
def test_what_a_file_asks_for_is_refused(name: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "zero.h").symlink_to("/dev/zero")
    (home / "etc").symlink_to("/etc")
    (home / "nul.h").write_bytes(b"int a;\0int b;")
    with (home / "large.h").open("wb") as file:
        file.truncate(100 << 20)
    for i in range(20):
        (home / f"a{i}.h").write_text(f'#include "a{i + 1}.h"\n#include "a{i + 1}.h"\n')
    front, expected = INCLUDED[name]
    reason = refused(home, front + K % "x[0] = 1;")
    assert re.search(expected, reason), reason


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe would wait for its writer for ever; links that point at each other lead nowhere."""
    os.mkfifo(tmp_path / "pipe.h")
    (tmp_path / "one.h").symlink_to(tmp_path / "two.h")
    (tmp_path / "two.h").symlink_to(tmp_path / "one.h")
    (tmp_path / "folder.h").mkdir()
    found = read(manifest(tmp_path, '#include "pipe.h"\n#include "one.h"\n#include "folder.h"\n' + K % "x[0] = 1;"))
    assert isinstance(found, ForeignRole), found.reason
    assert "pipe.h: no such header beside the source, taken as empty" in found.notes
    os.mkfifo(tmp_path / "pipe.cu")
    (tmp_path / "zero.cu").symlink_to("/dev/zero")
    for name, reason in (("pipe.cu", "no such file"), ("zero.cu", "lies outside of the folder")):
        with pytest.raises(ManifestError, match=reason):
            manifest(tmp_path, K % "x[0] = 1;", HEAD.replace("k.cu", name))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    m = manifest(tmp_path, "")
    (tmp_path / "k.cu").write_bytes(b"// \xff\xfe\n" + (K % "x[0] = 1;").encode())
    assert isinstance(read(m), ForeignRole), "of a comment nothing stays"
    (tmp_path / "k.cu").write_bytes((K % "x[0] = \xff\xfe 1;").encode("latin-1"))
    found = read(m)
    assert isinstance(found, Declined) and found.reason.startswith("k.cu:2: ")
    (tmp_path / "k.cu").write_bytes(bytes(range(1, 256)) * 1000)
    found = read(m)
    assert isinstance(found, Declined) and "k.cu" in found.reason


SLOW = {
    "conditions": "#if __X__\n" * 100_000 + K % "x[0] = 1;" + "#endif\n" * 100_000,
    "templates without an end": "a<\n" * 300_000 + K % "x[0] = 1;",
    "functions": "".join(f"__device__ int f{i}() {{ return f{i + 1}(); }}\n" for i in range(30_000))
    + K % "x[0] = f0();",
}


@pytest.mark.parametrize("name", SLOW)
def test_a_source_that_takes_too_long_to_read_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "SECONDS", 0.2)
    assert refused(tmp_path, SLOW[name]).startswith("k.cu: reading it took over 0.2 s")
    monkeypatch.undo()
    assert isinstance(read(manifest(tmp_path, K % "x[0] = 1;"), compiler=bounded), ForeignRole), "the next has its time"


def test_a_chain_of_macros_is_looked_through_once(tmp_path: Path) -> None:
    chain = "".join(f"#define M{i} M{i - 1}\n" for i in range(1, 2000))
    every = K % "".join(f"x[0] += M{i};" for i in range(1, 2000))
    found = refused(tmp_path, '#define M0 printf("")\n' + chain + every)
    assert found.startswith("k.cu:2002: printf (through the macro M1)")


MEASURED = """
import sys
from pathlib import Path
from weft.generate.cuda.foreign.manifest import read as manifest
from weft.generate.cuda.foreign.read import read
found = read(manifest(Path(sys.argv[1])))
print(found.reason)
# since exec: what getrusage says holds for the process that it was forked from, too
status = Path("/proc/self/status").read_text().splitlines()
print(next(int(x.split()[1]) >> 10 for x in status if x.startswith("VmHWM")))
"""


def test_memory_is_bounded_too(tmp_path: Path) -> None:
    """In a process of its own, whose peak is its own: what is not read is not held."""
    with (tmp_path / "large.h").open("wb") as file:
        file.truncate(2 << 30)
    manifest(tmp_path, '#include "large.h"\n' + K % "x[0] = 1;", rest=IN_OUT)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "kernel.toml")], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    reason, mib = done.stdout.splitlines()[-2:]
    assert "large.h: over 4194304 bytes" in reason and int(mib) < 1024


def test_limits_of_the_compiler_are_those_of_its_process_alone() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_CPU)
    (found,) = bounded([ConfinedJob("__global__ void k(float* x) { x[0] = 1; }", "compute_80")])
    assert isinstance(found, ConfinedResult)
    assert before == (resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_CPU))


COLLIDING = """
#define N 3
struct Pair { float a; };
__constant__ float table[4];
__device__ float helper(float v) { return v * N + table[0]; }
__global__ void k(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  Pair lc = {s[0]}, be = {1.0f}, role = {2.0f}, sm = {3.0f};
  int w = 1, block = 2, thread = 3;
  x[threadIdx.x] = helper(lc.a + be.a + role.a + sm.a + w + block + thread);
}
"""


def test_names_that_both_sources_have_are_each_its_own(tmp_path: Path) -> None:
    """The same file on both sides, with names that the fused kernel's own text has too."""
    from weft.device.cuda.facts import profile
    from weft.generate.cuda.role.fused import fuse, shapes
    from weft.kernels.colocation import FusedSource

    table = '[[constants]]\nname = "table"\ntype = "float"\nshape = [4]\ninit = "zeros"\n'
    m = manifest(tmp_path, COLLIDING, rest=IN_OUT + table)
    role = read(m, compiler=bounded)
    assert isinstance(role, ForeignRole), role.reason
    facts = profile("h200")
    made = fuse(role.source, [role.source], shapes(role.source, [role.source], facts)[0], facts=facts)
    assert isinstance(made, FusedSource), made.reason
    (found,) = bounded([ConfinedJob(made.text, "sm_90a", ("&w_lc::w_foreign::table", "&w_be0::w_foreign::table"))])
    assert isinstance(found, ConfinedResult), found.reason
    assert len(set(found.names)) == 2
