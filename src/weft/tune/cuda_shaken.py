"""A kernel in a form that shows what it does not wait for; verified beside the kernel, never timed.

It computes the same, but every freedom that the machine has is used: behind each point where threads meet or wait, and
where the kernel begins, every warp may stay behind for some microseconds, each by its own draw; the thread that makes
barriers ready (mbarrier.init) stays behind all others, also those that wait for the kernel before; and what a thread
copies into shared memory without waiting destroys what lay there at once and arrives when the thread waits for it, or
never. A barrier or a wait that is missing, or too few copies waited for, gives other numbers then, or hangs. In the
kernel itself they may come right a thousand times, where nothing delays the warp that others read from.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import weft.generate.cuda
from weft.kernels.source import CudaSource, Schedule

_HEAD = """// delays and late copies: see weft.tune.cuda_shaken
static __device__ __forceinline__ void w_stay(unsigned site) {
  unsigned at, warp = ((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x) >> 5;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(at) :: "memory");
  at = (at >> 2) + (warp + 1u) * 0x9E3779B9u + site * 0x85EBCA6Bu + blockIdx.x * 0xC2B2AE35u;
  at ^= at >> 16, at *= 0x7FEB352Du, at ^= at >> 15, at *= 0x846CA68Bu, at ^= at >> 16;
  asm volatile("nanosleep.u32 %0;" :: "r"((at & 1u) ? 0u : (at >> 8 & 4095u)) : "memory");
}
static __device__ __forceinline__ void w_lag() {  // behind the kernel before, and longer than any warp stays
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  asm volatile("nanosleep.u32 50000;" ::: "memory");
}
struct w_late {
  enum { MOST = 40 };
  unsigned to[MOST], bytes[MOST], group[MOST];
  const void* from[MOST];
  unsigned first, count, groups;
  __device__ __forceinline__ w_late() : first(0), count(0), groups(0) {}
  __device__ __forceinline__ void copy(unsigned at, const void* p, unsigned n = 16u) {
    if (count == MOST) arrive();  // it may be as early as that
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(at), "r"(0xFFFFFFFFu) : "memory");
    const unsigned k = (first + count++) % MOST;
    to[k] = at, from[k] = p, bytes[k] = n, group[k] = groups;
  }
  __device__ __forceinline__ void commit() { ++groups; }
  __device__ __forceinline__ void arrive() {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\\ncp.async.commit_group;\\ncp.async.wait_group 0;"
                 :: "r"(to[first]), "l"(from[first]), "r"(bytes[first]) : "memory");
    first = (first + 1) % MOST, --count;
  }
  __device__ __forceinline__ void arrived(unsigned left) {  // all but the last groups
#pragma unroll 1
    while (count && group[first] + left < groups) arrive();
  }
};
#define __syncthreads() (__syncthreads(), w_stay(__LINE__))
#define w_copy16_late(...) w_q.copy(__VA_ARGS__)
#define w_commit_late() w_q.commit()
"""
_MEET = (
    "w_wait", "w_together", "__syncwarp", "w_bar_wait", "w_mail_wait", "w_named_barrier",
    "w_cluster_sync", "w_cluster_wait", "w_cluster_leave",
)  # fmt: skip
_CALL = re.compile(rf"(?<!void )(?<!bool )(?<![\w.])({'|'.join(_MEET)})(?=\()")
_GROUPS = re.compile(r"(?<!void )(?<![\w.])(w_group_wait|w_stores_read)<(\w+)>\(\)")
_ROLE = re.compile(r"\brole\.(?:pdl_wait|named_barrier)\((?:[^()]|\([^()]*\))*\)")
_ARRIVED = re.compile(r"(?<!void )(?<![\w.])w_arrived<(.+?)>\(\)")
_COPIES = re.compile(r"(?<!void )(?<![\w.])(w_copy16|w_commit)(?=\()")
_INIT = re.compile(r"(?<!void )(?<![\w.])w_bar_init\(")
_GUARD = re.compile(r"(?<!\w)if \((?:[^(){}]|\([^(){}]*\))*\) \{")
_TOP = re.compile(r"^(extern \"C\" __global__|W_KERNEL\(|W_FN |static __device__|template |INLINE )")
_SHARES = re.compile(
    r"\b(__shared__|W_SHARED|W_DYNAMIC|__syncthreads|w_sync|role\.sync|role\.named_barrier\w*|w_any_thread|w_arrived"
    r"|w_bar_wait|w_named_barrier|w_cluster_\w+)\b"
)
"""What stands in a line in which threads share memory, meet or wait."""


_ENTRY = re.compile(r"\bk[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Shaken:
    """A kernel in the form that is shaken."""

    source: CudaSource
    skeleton: str
    """Hash of the template and of the lines in which threads share, meet or wait: common to a kind of kernels."""


@cache
def header_lines() -> frozenset[str]:
    """What stands in the headers that texts begin with."""
    found = Path(weft.generate.cuda.__file__).parent.rglob("*.h")
    return frozenset(line for path in found for line in path.read_text(encoding="utf-8").split("\n"))


def shaken(source: CudaSource) -> Shaken | None:
    """The form of a kernel that is shaken; None where its threads share no memory."""
    headers = header_lines()
    lines = source.text.split("\n")
    own = [k for k, line in enumerate(lines) if line not in headers]
    meeting = [_ENTRY.sub("", lines[k]) for k in own if _SHARES.search(lines[k])]
    if not meeting:
        return None
    template = str(dict(source.schedule.params).get("template", ""))
    skeleton = hashlib.sha256("\n".join([template, *meeting]).encode()).hexdigest()
    starts = [k for k in own if _TOP.match(lines[k])]
    late = _copying(lines, own, starts)
    lagging = _making_ready(lines, own, starts)
    found = list(lines)
    for k in own:
        line = lines[k]
        if line.startswith("#"):
            continue
        if k in lagging:
            line = line[: lagging[k]] + " w_lag();" + line[lagging[k] :]
        line = _CALL.sub(r"w_stay_\1", line)
        line = _GROUPS.sub(rf"(\1<\2>(), w_stay({k}))", line)
        line = _ROLE.sub(rf"(\g<0>, w_stay({k}))", line)
        if late:
            line = _ARRIVED.sub(rf"(w_q.arrived(\1), w_stay({k}))", line)
            line = _COPIES.sub(r"\1_late", line)
        else:
            line = _ARRIVED.sub(rf"(w_arrived<\1>(), w_stay({k}))", line)
        if k in starts and line.endswith("{"):
            line += (" w_late w_q;" if k in late else "") + (f" w_stay({k});" if _is_kernel(line) else "")
        found[k] = line
    calls = "".join(f"#define w_stay_{name}(...) ({name}(__VA_ARGS__), w_stay(__LINE__))\n" for name in _MEET)
    schedule = Schedule(source.schedule.generator, (*source.schedule.params, ("shaken", 1)))
    return Shaken(replace(source, schedule=schedule, text=_HEAD + calls + "\n".join(found)), skeleton)


def _copying(lines: Sequence[str], own: Sequence[int], starts: Sequence[int]) -> frozenset[int]:
    """Where functions begin that copy and wait for that; none where one may copy what another one waits for.

    What a kernel copies itself no caller waits for, and where nobody waits, nothing is waited for elsewhere: a kernel
    that has lost its only wait copies late, and is found out.
    """
    copies, waits = (
        {max((s for s in starts if s < k), default=-1) for k in own if pattern.search(lines[k])}
        for pattern in (_COPIES, _ARRIVED)
    )
    mine = frozenset(own)
    hidden = [
        x for k, x in enumerate(lines) if k not in mine or x.startswith("#")
    ]  # headers and macros stay as they are
    alone = copies - waits
    if not waits <= copies or -1 in copies or (alone and any(_ARRIVED.search(x) for x in hidden)):
        return frozenset()
    if waits and not all(_is_kernel(lines[s]) for s in alone):
        return frozenset()
    return frozenset(copies)


def _is_kernel(line: str) -> bool:
    return "__global__" in line or line.startswith("W_KERNEL(")


def _making_ready(lines: Sequence[str], own: Sequence[int], starts: Sequence[int]) -> dict[int, int]:
    """Where the blocks begin in which one thread makes barriers ready: behind which character of which lines."""
    found: dict[int, int] = {}
    for k in own:
        begin = max((s for s in starts if s < k), default=-1)
        for made in _INIT.finditer(lines[k]):
            before = [(k, lines[k][: made.start()]), *((j, lines[j]) for j in range(k - 1, begin, -1))]
            for j, text in before:
                if guards := list(_GUARD.finditer(text)):
                    found[j] = guards[-1].end()
                    break
    return found
