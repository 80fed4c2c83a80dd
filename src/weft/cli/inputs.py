"""`--input` and `--dim`: arrays from files, or drawn, by the names of a model's inputs or in their order."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.show import visible
from weft.errors import OptionError

if TYPE_CHECKING:
    import numpy as np
    import torch

Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        help="NAME=FILE or NAME=random; a .npy file, or of a .npz file the member NAME, else FILE:MEMBER; "
        "without NAME= one file per input, in order",
    ),
]
Dims = Annotated[
    list[str],
    typer.Option("--dim", help="size of a symbolic dimension, e.g. batch=4; of one without a name INPUT:AXIS=4"),
]
RANDOM = "random"
_PICKLE = b"\x80"
_ZIP = b"PK\x03\x04"
_MOST_BYTES = 16 << 30
"""Of an array in a compressed file, which may be a thousand times as large as the file."""


def dims_of(pairs: Sequence[str]) -> dict[str, int]:
    """Sizes by the names of dimensions.

    Raises:
        OptionError: not NAME=SIZE [W001].
    """
    found: dict[str, int] = {}
    for pair in pairs:
        name, _, size = pair.rpartition("=")
        if not (name and size.isascii() and size.isdigit()):
            raise OptionError(option="--dim", problem=f"{visible(pair)!r} is not NAME=SIZE, nor INPUT:AXIS=SIZE")
        if found.setdefault(name, int(size)) != int(size):
            raise OptionError(option="--dim", problem=f"{visible(name)!r} is {found[name]} and {size}")
    return found


def given_inputs(texts: Sequence[str]) -> list[torch.Tensor] | dict[str, torch.Tensor | None] | None:
    """What the files hold: by name, where None is random, or in order; None: nothing is given.

    Raises:
        OptionError: a file that holds no array, a name that is given twice, or names for only some [W001].
    """
    pairs = [_pair(text) for text in texts]
    if not any(name for name, _ in pairs):
        return [_array(file, "") for _, file in pairs] or None
    found: dict[str, torch.Tensor | None] = {}
    for name, file in pairs:
        if not name:
            raise OptionError(option="--input", problem=f"{visible(file)!r} has no NAME=, others have one")
        if name in found:
            raise OptionError(option="--input", problem=f"{visible(name)!r} is given twice")
        found[name] = None if file == RANDOM else _array(file, name)
    return found


def _pair(text: str) -> tuple[str, str]:
    name, separator, file = text.partition("=")
    if separator and not name:
        raise OptionError(option="--input", problem=f"{visible(text)!r} is not NAME=FILE, NAME=random, nor a file")
    return (name, file) if separator else ("", text)


def in_order(
    given: Sequence[torch.Tensor] | Mapping[str, torch.Tensor | None] | None,
    names: Sequence[str],
    drawn: Sequence[torch.Tensor],
    *,
    every: bool = False,
) -> list[torch.Tensor]:
    """One tensor for each input of a plan: given, or else of those drawn; with `every`, only if that was asked for.

    Raises:
        OptionError: a name that the plan does not have, or with `every` one that is left out [W001].
    """
    if not isinstance(given, Mapping):
        return list(given if given is not None else drawn if not every else ())
    if unknown := next((name for name in given if name not in names), None):
        has = ", ".join(visible(n) for n in names)
        raise OptionError(option="--input", problem=f"there is no input {visible(unknown)!r}, but {has}")
    if every and (left := next((name for name in names if name not in given), None)):
        raise OptionError(option="--input", problem=f"input {visible(left)!r} is not given: NAME=FILE, or NAME=random")
    found = [given.get(name) for name in names]
    return [x if mine is None else mine for mine, x in zip(found, drawn, strict=True)]


def _array(text: str, name: str) -> torch.Tensor:
    """The array of a .npy file, or a member of a .npz file; nothing is unpickled."""
    import numpy as np
    import torch

    file, member = Path(text), name
    if not file.exists() and ":" in text:
        before, _, member = text.rpartition(":")
        file = Path(before)
    shown = visible(file.name)
    try:
        with file.open("rb") as source:  # what is no array, a device say, is not read to its end
            start = source.read(len(np.lib.format.MAGIC_PREFIX))
            if start[:4] == _ZIP:
                source.seek(0)
                return _member(source, member, shown)
            if start[:1] == _PICKLE:
                raise ValueError("a pickle can run code and is not read; save the array by numpy.save")
            content = io.BytesIO(start + (source.read() if start == np.lib.format.MAGIC_PREFIX else b""))
        return torch.from_numpy(_read(content))
    except (OSError, ValueError, TypeError, EOFError, SyntaxError, MemoryError, zipfile.BadZipFile) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problem = problem or f"it asks for more memory than there is ({type(error).__name__})"
        raise OptionError(option="--input", problem=f"{shown}: {visible(problem, 200)}") from None


def _member(source: Any, member: str, shown: str) -> torch.Tensor:
    import torch

    with zipfile.ZipFile(source) as archive:
        members = {i.filename.removesuffix(".npy"): i for i in archive.infolist()}
        found = members.get(member) or (next(iter(members.values())) if len(members) == 1 and not member else None)
        if found is None:
            listed = ", ".join(visible(m) for m in list(members)[:8])
            wanted = f"no array {visible(member)!r}" if member else "several arrays"
            raise ValueError(f"it has {wanted}: {listed or 'it is empty'}; name one as {shown}:MEMBER")
        if found.file_size > _MOST_BYTES:
            raise ValueError(f"the array {visible(member)!r} has {found.file_size} bytes")
        with archive.open(found) as content:
            return torch.from_numpy(_read(io.BytesIO(content.read(_MOST_BYTES))))


def _read(content: io.BytesIO) -> np.ndarray[Any, Any]:
    import numpy as np

    found: np.ndarray[Any, Any] = np.lib.format.read_array(content, allow_pickle=False)
    return found
