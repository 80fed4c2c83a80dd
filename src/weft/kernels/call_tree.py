"""Arguments and results of a module as a file keeps them: a tree of nodes `[kind, body]` in JSON.

| kind | body |
|---|---|
| `TENSOR` | its number among the plan's inputs or outputs |
| `COMPLEX` | the number of a tensor whose last dimension holds real and imaginary part |
| `VALUE` | a number, a text, true, false or null |
| `LIST`, `TUPLE` | nodes |
| `DICT` | pairs of a key (a text or a number) and a node |
| `FIELDS` | pairs of a name and a node: a dataclass or a named tuple |
"""

from __future__ import annotations

import math

TENSOR, COMPLEX, VALUE, LIST, TUPLE, DICT, FIELDS = "t", "c", "v", "l", "u", "d", "f"


def is_plain(x: object) -> bool:
    """Whether a value can be the body of `VALUE`."""
    return x is None or type(x) in (bool, int, str) or (type(x) is float and math.isfinite(x))
