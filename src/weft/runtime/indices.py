"""Values that index a tensor, checked after a run (`Options(check_indices=True)`).

The kernels clamp what lies outside, so that the run itself did no harm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.errors import InputError
from weft.kernels.plan import IndexCheck


class IndexOutsideError(InputError):
    """An index outside of what it indexes."""

    code = "W013"
    template = "index {value} at {place} is outside of [{low}, {bound}){operator}"
    todo = "give indices within the bounds; without check_indices they are clamped"


def checked(
    outputs: Sequence[torch.Tensor], checks: Sequence[IndexCheck], *, look: bool = True
) -> tuple[torch.Tensor, ...]:
    """The outputs without the values of indices, which stand at their end; without `look`, whatever these are.

    Raises:
        IndexOutsideError: one of these is outside of its bounds: the first in row-major order [W013].
    """
    for check in checks if look else ():
        values = outputs[check.output]
        outside = (values < check.low) | (values >= check.bound)
        if bool(outside.any()):
            raise _error(values.cpu(), outside.cpu(), check)
    return tuple(outputs[: min((c.output for c in checks), default=len(outputs))])


def _error(values: torch.Tensor, outside: torch.Tensor, check: IndexCheck) -> IndexOutsideError:
    flat = int(outside.reshape(-1).to(torch.uint8).argmax())
    place = tuple(int(k) for k in torch.unravel_index(torch.tensor(flat), values.shape)) if values.dim() else ()
    return IndexOutsideError(
        where=f"input {check.input}" if check.input >= 0 else "an index that the model computes",
        value=int(values.reshape(-1)[flat]),
        place=list(place),
        low=check.low,
        bound=check.bound,
        operator=f" of {check.operator[:200]}" if check.operator else "",
    )
