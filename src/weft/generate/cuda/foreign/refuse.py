"""What a kernel of others must not do as a role: looked for in the parse tree, and in the PTX that the compiler made.

The tree gives the line and the reason in the words of the source; macros are looked through by name. The PTX is what
counts: it is made of a frame whose threads, blocks and barriers are no registers and no instructions of the machine, so
whatever of these stands there, the source brought past the frame.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.generate.cuda.foreign.cut import Cut, Item, walk
from weft.generate.cuda.foreign.manifest import Manifest
from weft.generate.cuda.foreign.patience import tick
from weft.generate.cuda.foreign.unit import OWN_MACROS
from weft.generate.cuda.foreign.wrap import UNIT
from weft.ir.declined import Declined

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_ROLE_THREADS = 512
"""Of a block that can share a CTA with another role."""
_CALLS = {
    r"(?:v|f|sn?)?printf|puts|putchar": "its buffer belongs to the process, and the host must drain it",
    r"assert|__assert\w*|__static_assert_fail": "it ends the context of both jobs",
    r"malloc|calloc|realloc|free|cudaMalloc|cudaFree|__nv_aligned_device_malloc": "its heap "
    "belongs to the process; allocate on the host",
    r"tex[123]D\w*|texCubemap\w*|tex1Dfetch|tex2Dgather|tex\.\w+": "a texture: read the buffer itself (`__ldg`)",
    r"surf[123]D\w*|surfCubemap\w*": "a surface: read and write the buffer itself",
    r"__nanosleep": "a role that waits for others keeps the latency-critical one waiting",
    r"__trap|__brkpt|abort|exit|__exit": "it would end the kernel of both jobs",
    r"cudaLaunch\w*|cudaDeviceSynchronize|cudaStream\w+|cudaEvent\w+|cudaGetParameterBuffer\w*": "dynamic parallelism: "
    "launch from the host",
    r"__prof_trigger|__pm\d+": "a profiler trigger",
    r"__barrier_sync\w*|__named_barrier\w*": "a barrier by number: only __syncthreads and its forms are taken",
    r"__cluster\w+|cluster_arrive|cluster_wait": "a cluster: a role's blocks stand alone",
    r"__nv_isGlobal|__nvvm_\w*(?:sreg|barrier|bar)\w*|__builtin_nv\w*": "an intrinsic that goes past threadIdx "
    "and __syncthreads",
}  # fmt: skip
_NAMES = {
    r"cooperative_groups|this_grid|grid_group|multi_grid_group|this_multi_grid": "blocks of a role start "
    "in any order and never all at once; use __syncthreads and __syncwarp",
    r"cluster_group|this_cluster|__cluster_dims__|clusterIdx|clusterDim\w*": "a cluster: a role's blocks stand alone",
    r"cudaTextureObject_t|texture|textureReference": "a texture: read the buffer itself (`__ldg`)",
    r"cudaSurfaceObject_t|surface|surfaceReference": "a surface: read and write the buffer itself",
    r"__managed__": "managed memory: use __device__",
}
_BARE = frozenset({"texture", "surface"})
"""Words that others use as well: only `texture<` is the type."""
_ASM = (
    (
        (r"%%?(?:tid|ntid|ctaid|nctaid|warpid|nwarpid|clusterid|nclusterid|cluster_\w+|is_explicit_cluster"
        r"|aggr_smem_size|total_smem_size|dynamic_smem_size|gridid|smid|nsmid|envreg\d+)\b"),
        "the place of a thread or block",
    ),
    (r"\b(?:bar|barrier)(?:\.\w+)+|\bbar\b", "a barrier by number"),
    (r"\bsetmaxnreg\b", "registers are the CTA's"),
    (r"\b(?:exit|trap|brkpt)\s*;", "it would end the kernel of both jobs"),
    (r"\bret\b", "a return past the role"),
    (r"\bnanosleep\b", "a wait"),
    (r"\bgriddepcontrol\b", "dependent launch is the latency-critical role's"),
    (r"\b(?:tex|tld4|txq|suld|sust|sured|suq)\.", "a texture or surface"),
    (r"\b(?:mapa|getctarank|clusterlaunchcontrol)\b|\.shared::cluster\b", "a cluster"),
    (r"\b(?:call|brx\.idx)\b", "a call that cannot be followed"),
    (r"\bpmevent\b", "a profiler trigger"),
    (r"\.(?:shared|global|const|local)\s+(?:\.align\s+\d+\s+)?\.[bus]\d+\s", "memory declared in PTX"),
)  # fmt: skip
_WORD = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(r'"((?:\\.|[^"\\\n])*)"')
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'')


def refuse(cut: Cut, manifest: Manifest) -> Declined | None:
    """Why a cut kernel is no role, as far as its source says; None: nothing found."""
    if manifest.threads > MOST_ROLE_THREADS:
        return Declined(
            f"{manifest.path.name}: blocks of {manifest.threads} threads; a role has up to {MOST_ROLE_THREADS} "
            "(larger blocks run alone: as a persistent co-runner or in idle time)"
        )
    declared = {*(c.name for c in manifest.constants), *manifest.state}
    own = {n for x in cut.kept for n in x.names}
    hidden = _hidden(cut, own)
    for item in cut.kept:
        if (found := _words(cut, item, own, hidden)) is not None:
            return found
        if (found := _mutable(cut, item, declared)) is not None:
            return found
        for node in walk(item.node):
            if node.type == "gnu_asm_expression" and (found := _asm(cut, node)) is not None:
                return found
            if node.type == "kernel_call_syntax":
                return Declined(f"{cut.where(node)}: dynamic parallelism: launch from the host")
            if node.type in _LOOPS and (found := _loop(cut, node)) is not None:
                return found
    return _missing(cut, manifest)


def _hidden(cut: Cut, own: set[str]) -> dict[str, tuple[str, str]]:
    """Macros that stand for a refused name -> that name, and why."""
    users: dict[str, list[str]] = {}
    for macro, words in cut.unit.macros.items():
        for word in words:
            users.setdefault(word, []).append(macro)
    found: dict[str, tuple[str, str]] = {}
    for word in sorted(users):
        tick()
        if word in own or (reason := _reason(word, True, "<")) is None:
            continue
        waiting = [word]
        while waiting:
            for macro in users.get(waiting.pop(), ()):
                if macro not in found:
                    found[macro] = (word, reason)
                    waiting.append(macro)
    return found


def _words(cut: Cut, item: Item, own: set[str], hidden: dict[str, tuple[str, str]]) -> Declined | None:
    """Names that say it."""
    raw = cut.data[item.start : item.end].decode("utf-8", "replace")
    text = _LITERAL.sub(lambda m: '"' + " " * (len(m[0]) - 2) + '"' if len(m[0]) > 1 else m[0], raw)
    first = cut.data.count(b"\n", 0, item.start) + 1
    for found in _WORD.finditer(text):
        tick()
        word = found[0]
        if word.startswith("w_") and OWN_MACROS.fullmatch(word):
            line = first + text.count("\n", 0, found.start())
            return Declined(f"{cut.unit.where(line)}: {word} is a name of Weft; choose another")
        if word in own:
            continue
        behind = text[found.end() : found.end() + 40].lstrip()
        if text[max(0, found.start() - 40) : found.start()].rstrip().endswith((".", "->")):
            continue
        reason, one, through = _reason(word, behind.startswith(("(", "<")), behind), word, ""
        if reason is None and word in hidden:
            (one, reason), through = hidden[word], f" (through the macro {word})"
        if reason is not None:
            line = first + text.count("\n", 0, found.start())
            return Declined(f"{cut.unit.where(line)}: {one}{through}: {reason}")
    return None


def _reason(word: str, called: bool, behind: str) -> str | None:
    if called:
        for pattern, reason in _CALLS.items():
            if re.fullmatch(pattern, word):
                return reason
    for pattern, reason in _NAMES.items():
        if re.fullmatch(pattern, word) and (word not in _BARE or behind.lstrip().startswith("<")):
            return reason
    return None


def _mutable(cut: Cut, item: Item, declared: set[str]) -> Declined | None:
    """A `__device__` variable that a launch may change and the next would find changed."""
    if item.kind != "variable" or "__device__" not in item.qualifiers:
        return None
    if {"const", "constexpr", "__constant__", "__shared__"} & item.qualifiers or item.names & declared:
        return None
    name = min(item.names)
    return Declined(
        f"{cut.where(item)}: {name}: a __device__ variable keeps what a launch leaves in it; say in kernel.toml what "
        f'it holds before each ([[constants]]) or that it may stay (state = ["{name}"])'
    )


def _missing(cut: Cut, manifest: Manifest) -> Declined | None:
    """A variable of the manifest that the kernel does not mention."""
    there = {n for x in cut.plain if x.kind == "variable" for n in x.names}
    for name in (*(c.name for c in manifest.constants), *manifest.state):
        if name not in there:
            return Declined(
                f"{manifest.path.name}: {name} is no __constant__ or __device__ variable that the kernel uses"
            )
    return None


_LOOPS = frozenset({"while_statement", "for_statement", "do_statement"})
_CHANGES = frozenset({"assignment_expression", "update_expression"})
_ENDS = frozenset({"break_statement", "return_statement", "goto_statement", "throw_statement"})
_ALWAYS = re.compile(r"\(?\s*(?:true|[1-9]\d*|!0)?\s*\)?")
_IDLE = re.compile(r"__threadfence\w*|__syncwarp|__nanosleep|clock\w*")


def _loop(cut: Cut, node: Node) -> Declined | None:
    """Loops that never end, and loops that only wait."""
    body, condition = node.child_by_field_name("body"), node.child_by_field_name("condition")
    text = (condition.text or b"").decode("utf-8", "replace") if condition is not None else ""
    inside = list(walk(body)) if body is not None else []
    # macros in a loop may hold what ends it
    words = {x.text.decode() for x in inside if x.type == "identifier" and x.text}
    if _ALWAYS.fullmatch(text) and words.isdisjoint(cut.unit.macros) and not any(x.type in _ENDS for x in inside):
        return Declined(f"{cut.where(node)}: a loop that never ends")
    steps = [n for part in node.children if part != body for n in walk(part)]
    if condition is None or any(x.type in _CHANGES for x in steps):
        return None
    plain = [x for x in inside if x.type in ("expression_statement", "declaration", "if_statement", "for_statement")]
    idle = all(_only_waits(x) for x in plain)
    if idle and not words & set(cut.unit.macros):
        return Declined(f"{cut.where(node)}: a loop that waits for what another thread or block writes: blocks of "
                        "a role start in any order, so it may wait for ever")  # fmt: skip
    return None


def _only_waits(node: Node) -> bool:
    named = [c for c in node.children if c.is_named]
    if not named:
        return True
    if len(named) != 1 or named[0].type != "call_expression":
        return False
    function = named[0].child_by_field_name("function")
    return function is not None and _IDLE.fullmatch((function.text or b"").decode("utf-8", "replace")) is not None


def _asm(cut: Cut, node: Node) -> Declined | None:
    """Inline PTX."""
    text = (node.text or b"").decode("utf-8", "replace")
    code = "\n".join(_STRING.findall(text)).replace("\\n", "\n").replace("\\t", " ")
    for pattern, reason in _ASM:
        if found := re.search(pattern, code):
            return Declined(f"{cut.where(node)}: inline PTX: {found[0].strip()}: {reason}")
    return None


# -- what the compiler made of it

_PTX = (
    (re.compile(r"(?:bar|barrier)(?:\.|$)"), "a barrier past __syncthreads"),
    (re.compile(r"(?:exit|trap|brkpt)$"), "it would end the kernel of both jobs"),
    (re.compile(r"setmaxnreg"), "registers are the CTA's"),
    (re.compile(r"nanosleep"), "a wait: it keeps the latency-critical role waiting"),
    (re.compile(r"griddepcontrol"), "dependent launch is the latency-critical role's"),
    (re.compile(r"(?:tex|tld4|txq|suld|sust|sured|suq)\."), "a texture or surface: read the buffer itself"),
    (re.compile(r"(?:mapa|getctarank|clusterlaunchcontrol)"), "a cluster: a role's blocks stand alone"),
    (re.compile(r"pmevent"), "a profiler trigger"),
    (re.compile(r"(?:alloca|stacksave|stackrestore)"), "memory of a size that is known at run time only"),
    (re.compile(r"brx"), "a jump that cannot be followed"),
)
_REGISTERS = re.compile(
    r"%(?:tid|ntid|ctaid|nctaid|warpid|nwarpid|clusterid|nclusterid|cluster_\w+|gridid|envreg\d+|total_smem_size"
    r"|dynamic_smem_size)\b"
)
_EXTERN = re.compile(r"\.extern\s+\.func\s+(?:\([^)]*\)\s*)?([\w$]+)")
_EXTERN_REASONS = (
    ("vprintf", "its buffer belongs to the process, and the host must drain it"),
    ("__assertfail", "it ends the context of both jobs"),
    ("malloc", "its heap belongs to the process; allocate on the host"),
    ("free", "its heap belongs to the process; allocate on the host"),
    ("cuda", "dynamic parallelism: launch from the host"),
)
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')
_SIZE = re.compile(r"// w_size (\d+) (\d+) (\d+)")
_SHARED = re.compile(r"\s*(?:\.\w+\s+)*\.shared\s+(?:\.align\s+\d+\s+)?\.\w+\s+([\w$]+)")
_INSTRUCTION = re.compile(r"\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)")
_INSTANCE = re.compile(r"([\w$]*w_foreign_mark(\d+)[\w$]*)\s*(?:\[\d+\])?\s*(?:=[^;\n]*)?;")
PROBE_SHARED = "w_probe_shared"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the compiler says of shared variables: number -> bytes."""

    bytes: dict[int, int]
    alignment: dict[int, int]


def judge_ptx(cut: Cut, ptx: str, single: Mapping[int, int]) -> Sizes | Declined:
    """What the compiler made of a probe (see `probe.py`): sizes of shared variables, or why the kernel is no role.

    `single`: shared variables of function templates -> their lines.
    """
    marks: dict[int, set[str]] = {}
    for symbol in _INSTANCE.finditer(ptx):
        marks.setdefault(int(symbol[2]), set()).add(symbol[1])
    for number, symbols in sorted(marks.items()):
        if len(symbols) > 1:
            return Declined(
                f"{cut.unit.where(single.get(number, 0))}: shared memory of a function template with "
                f"{len(symbols)} instances: each has its own; declare it in the kernel and pass a pointer"
            )
    files: dict[str, str] = {}
    lines: list[tuple[int, str]] = []
    line = 0
    for text in ptx.split("\n"):
        if found := _FILE.match(text):
            files[found[1]] = found[2]
    sizes: dict[int, int] = {}
    alignment: dict[int, int] = {}
    for text in ptx.split("\n"):
        if found := _LOC.match(text):
            line = int(found[2]) if files.get(found[1], "").endswith(UNIT) else line
            continue
        if found := _SIZE.search(text):
            number = int(found[1])
            sizes[number] = max(sizes.get(number, 0), int(found[2]))
            alignment[number] = max(alignment.get(number, 0), int(found[3]))
            continue
        lines.append((line, text.partition("//")[0]))
    for line, text in lines:
        if (bad := _bad(text)) is not None:
            place = f"{cut.unit.where(line)}: " if line else f"{cut.unit.source}: "
            return Declined(f"{place}in the PTX of the kernel: {bad}")
    return Sizes(sizes, alignment)


def _bad(text: str) -> str | None:
    if found := _EXTERN.search(text):
        for name, reason in _EXTERN_REASONS:
            if found[1].startswith(name):
                return f"{found[1]}: {reason}"
        return f"{found[1]}: a function that is defined nowhere"
    if (found := _SHARED.match(text)) and found[1] != PROBE_SHARED:
        return f"{found[1]}: shared memory that a macro declares; declare it in the function itself"
    if found := _REGISTERS.search(text):
        return f"{found[0]}: the place of a thread or block, past threadIdx and blockIdx"
    if found := _INSTRUCTION.match(text):
        for pattern, reason in _PTX:
            if pattern.match(found[1]):
                return f"{found[1]}: {reason}"
    if re.search(r"\.shared::cluster\b", text) and not re.search(r"\.async\b", text):
        return ".shared::cluster: a cluster: a role's blocks stand alone"
    return None
