"""Texts of kernels that were changed and compile to the machine code that they had.

Measurements are kept under the text of a kernel (`weft.kernels.codec.kernel_sha256`). `tools/replay.py --aliases`
writes `aliases.json`: of every kernel in the plans of the networks whose text differs between two commits and whose
machine code, launches and memory do not, the earlier identity and the present one. Rows with the earlier one then stay
valid, without compiling. What is not in it is found by its machine code, once it is compiled, where the row has that.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources

from weft.errors import ArtifactError

FORMAT = 1
FILE = "aliases.json"
REMEDY = "make it again with `python tools/replay.py --base COMMIT --only cuda --aliases`"
_IDENTITY = re.compile(r"[0-9a-f]{64}")


def former(kernel: str) -> tuple[str, ...]:
    """The identities of the texts that a kernel had before, with the machine code that it has."""
    return _former().get(kernel, ())


@cache
def _former() -> Mapping[str, tuple[str, ...]]:
    """A table that cannot be read costs what it would have saved."""
    found: dict[str, tuple[str, ...]] = {}
    with contextlib.suppress(OSError, UnicodeDecodeError, ArtifactError):
        for old, new in from_json(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")).items():
            found[new] = (*found.get(new, ()), old)
    return found


def from_json(text: str) -> dict[str, str]:
    """Earlier identity to present one.

    Raises:
        ArtifactError: not such a table [W401].
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, not {FORMAT}")
        found = {str(old): str(new) for new, olds in data["kernels"].items() for old in olds}
        if bad := [x for pair in found.items() for x in pair if not _IDENTITY.fullmatch(x)]:
            raise ValueError(f"{bad[0][:80]!r} is no SHA-256")
        if found.keys() & set(found.values()):
            raise ValueError("an earlier identity that is a present one, too")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"malformed table of earlier kernels: {type(error).__name__}: {error}"
        raise ArtifactError(problem=problem, remedy=REMEDY) from None
    return found


def to_json(aliases: Mapping[str, str]) -> str:
    """Inverse of `from_json`, a line for each kernel."""
    kernels: dict[str, list[str]] = {}
    for old, new in sorted(aliases.items()):
        kernels.setdefault(new, []).append(old)
    lines = [f"{json.dumps(new)}:{json.dumps(kernels[new], separators=(',', ':'))}" for new in sorted(kernels)]
    return f'{{"format":{FORMAT},"kernels":{{\n' + ",\n".join(lines) + "}}\n"


def joined(
    known: Mapping[str, str], changed: Mapping[str, str], before: Collection[str], present: Collection[str]
) -> dict[str, str]:
    """A table after a change of texts.

    Args:
        known: the table before it.
        changed: identities before and after it, of kernels that kept their machine code.
        before: identities of all kernels that there were, as far as they were looked at.
        present: the same of those that there are now.

    What an entry leads to is followed on. An entry that leads to a text that has gone, or has other machine code now,
    is left out, and so is one of a text that is back.
    """
    gone = set(before) - set(present) - changed.keys()
    last = {old: changed.get(new, new) for old, new in known.items()} | dict(changed)
    return {old: new for old, new in last.items() if new not in gone and old not in present}
