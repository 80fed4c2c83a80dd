"""Free pages of the C library's allocator go back to the system, in a process of its own: this one's heap is shared."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from tests.slow import few

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's allocator"
)
HELD = """
import ctypes
from pathlib import Path

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def leave_free(mb):
    '''So much is free in this thread's arena, below something that lives.'''
    pieces = [libc.malloc(100_000) for _ in range(mb * 2**20 // 100_000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 100_000)
    top = libc.malloc(100_000)
    for piece in pieces:
        libc.free(piece)
    return top
"""


def mb_that_go(setting: str, action: str) -> float:
    """What the process has less after an action, of 200 MB that were free in its heap."""
    text = f"""{HELD}
{setting}
before = resident_mb()
top = leave_free(200)
assert resident_mb() > before + 150, "nothing was left"
before = resident_mb()
{action}
print(before - resident_mb())
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_what_is_free_goes_back() -> None:
    assert mb_that_go("from weft.device.heap import trim_heap", "assert trim_heap()") > 150


def test_the_end_of_a_thread_s_own_arena_goes_back_too() -> None:
    """`malloc_trim` leaves half of it here; the allocator itself leaves all once a large piece came and went."""
    setting = """
from concurrent.futures import ThreadPoolExecutor
from weft.device.heap import trim_heap
libc.free(libc.malloc(30 << 20))
pool = ThreadPoolExecutor(1)
here = leave_free
def leave_free(mb):
    libc.free(pool.submit(here, 20).result())
    return here(mb)
"""
    left = "libc.malloc_trim(0)"
    assert mb_that_go(setting, f"{left}\nbefore = resident_mb()\npool.submit(trim_heap).result()") > 5


def test_nothing_happens_where_the_c_library_has_no_such_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.device import heap

    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not heap.trim_heap() and not heap.keep_freed_memory()
    with heap.heap_trimmed():
        pass


def test_what_is_freed_is_kept_and_taken_again_until_it_is_given_back() -> None:
    """Of 200 MB that the allocator would map anew each time."""
    text = f"""{HELD}
import resource
from weft.device.heap import keep_freed_memory, trim_heap

def faults_of_a_piece():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    piece = libc.malloc(200 << 20)
    ctypes.memset(piece, 1, 200 << 20)
    libc.free(piece)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_of_a_piece()
print(faults_of_a_piece())
assert keep_freed_memory()
faults_of_a_piece()
print(faults_of_a_piece())
held = resident_mb()
assert trim_heap()
print(held - resident_mb())
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    mapped, kept, given_back = map(float, done.stdout.split())
    assert kept < 100 < mapped and given_back > 150


SETTING = """
import sys, torch, weft
def other(n):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(n))
module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU()).eval()
options = weft.Options(budget_s=0, cache_dir=sys.argv[1])
compiled = weft.compile(module, other(1), options=options)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "action",
    few(
        [
            "weft.compile(module, other(2), options=options)",
            "compiled(other(2))",
            "compiled.refit({k: v + 1 for k, v in module.state_dict().items()}, recompile=True)",
        ],
        1,
    ),
)
def test_a_compilation_leaves_no_peak_behind(action: str, tmp_path: Path) -> None:
    setting = SETTING.replace("sys.argv[1]", repr(str(tmp_path)))
    assert mb_that_go(setting, action) > 100
