"""Texts of kernels that were changed and compile to the machine code that they had.

Measurements are kept under the text of a kernel (`weft.kernels.codec.kernel_sha256`). `tools/replay.py --aliases`
writes `aliases.json`: of every kernel in the plans of the networks whose text differs between two commits and whose
machine code, launches and memory do not, the earlier identity and the present one. Rows with the earlier one then stay
valid, without compiling. What is not in it is found by its machine code, once it is compiled, where the row has that.

Machine code is of one architecture, so each has pairs of its own, and a row is taken over where its environment names
that architecture. A pair stays true whatever is written later: parts of a replay may come in any order, and pairs of
several changes add up (`joined`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache, lru_cache
from importlib import resources

from weft.errors import ArtifactError

FORMAT = 2
FILE = "aliases.json"
REMEDY = "make it again with `python tools/replay.py --base COMMIT --only cuda --aliases`"
MOST = 8
"""Earlier texts of one kernel that are kept, the newest."""
Former = Mapping[str, tuple[str, ...]]
"""By the identity of a kernel those of the texts that it had before, the newest first."""
Table = Mapping[str, Former]
"""By architecture (`sm_90a`)."""
Pairs = Mapping[str, Collection[tuple[str, str]]]
"""By architecture: identities before and after a change."""
_IDENTITY = re.compile(r"[0-9a-f]{64}")
_ARCH = re.compile(r"sm_[0-9]{2,3}[af]?")


def former(kernel: str, environment: str) -> tuple[str, ...]:
    """The identities of the texts that a kernel had before, with the machine code that it has in an environment.

    Args:
        kernel: its identity.
        environment: the text of one, see `weft.tune.keys`. One for a GPU names the architecture that is compiled for.
    """
    return tuple(old for arch in _compiled_for(environment) for old in _former()[arch].get(kernel, ()))


@lru_cache(maxsize=64)
def _compiled_for(environment: str) -> tuple[str, ...]:
    return tuple(arch for arch in _former() if arch in _named(environment))


def _named(environment: str) -> set[str]:
    return set(re.findall(r"\bsm_\w+", environment))


@cache
def _former() -> Table:
    """A table that cannot be read costs what it would have saved."""
    with contextlib.suppress(OSError, UnicodeDecodeError, ArtifactError):
        return from_json(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return {}


def from_json(text: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """The table in a file.

    Raises:
        ArtifactError: not such a table [W401].
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, not {FORMAT}")
        found = {
            str(arch): {str(n): tuple(map(str, o)) for n, o in rows.items()} for arch, rows in data["archs"].items()
        }
        for arch, rows in found.items():
            if not _ARCH.fullmatch(arch):
                raise ValueError(f"{arch[:80]!r} is no architecture")
            for new, olds in rows.items():
                if bad := [x for x in (new, *olds) if not _IDENTITY.fullmatch(x)]:
                    raise ValueError(f"{bad[0][:80]!r} is no SHA-256")
                if not olds or len({new, *olds}) != len(olds) + 1:
                    raise ValueError(f"{new} has no earlier identities, or one of them twice")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"malformed table of earlier kernels: {type(error).__name__}: {error}"
        raise ArtifactError(problem=problem, remedy=REMEDY) from None
    return found


def to_json(table: Table) -> str:
    """Inverse of `from_json`, a line for each kernel of an architecture."""
    archs = []
    for arch, rows in sorted(table.items()):
        lines = [f"{json.dumps(new)}:{json.dumps(rows[new], separators=(',', ':'))}" for new in sorted(rows)]
        archs.append(f"{json.dumps(arch)}:{{\n" + ",\n".join(lines) + "}")
    return f'{{"format":{FORMAT},"archs":{{' + ",\n".join(archs) + "}}\n"


def joined(
    known: Table,
    same: Pairs,
    other: Pairs,
    before: Mapping[str, Collection[str]],
    present: Mapping[str, Collection[str]],
) -> dict[str, dict[str, tuple[str, ...]]]:
    """A table after a change of texts, or after a part of it: kernels that were not looked at keep what they have.

    Args:
        known: the table before it.
        same: identities before and after it, of kernels that kept their machine code.
        other: the same of kernels that have other machine code now.
        before: identities of all kernels that were looked at as they were before it.
        present: the same as they are now.

    A text that follows another takes over what that one followed: with (A, B) known, (B, C) gives (A, C), too. What is
    known of a text that was looked at and has gone is left out. Where a pair is told both ways, or one that is known is
    contradicted, nothing is taken over for the later text: it is measured again.
    """
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for arch in sorted({*known, *same}):
        has = known.get(arch, {})
        wrong = {new for old, new in other.get(arch, ()) if old in has.get(new, ()) or (old, new) in same.get(arch, ())}
        has = {new: olds for new, olds in has.items() if new not in wrong}
        gone = set(before.get(arch, ())) - set(present.get(arch, ()))
        rows = {new: olds for new, olds in has.items() if new not in gone}
        for old, new in sorted(same.get(arch, ())):
            if old != new and new not in wrong:
                followed = [old, *(x for x in _of_the_same_code(old, has, rows) if x != new)]
                rows[new] = tuple(dict.fromkeys([*followed, *rows.get(new, ())]))[:MOST]
        if rows:
            found[arch] = rows
    return found


def _of_the_same_code(kernel: str, *tables: Former) -> Iterator[str]:
    """What a kernel followed; and where another part of the change was told of it before, what that kernel followed."""
    for table in tables:
        yield from table.get(kernel, ())
        for olds in table.values():
            if kernel in olds:
                yield from olds
