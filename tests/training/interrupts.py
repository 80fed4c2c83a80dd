"""Steps that are interrupted at any time: all that they write is written, or nothing."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

TIMES = 200


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What a step writes."""
    state = [own for _, own in sorted(optimizer.state_dict()["state"].items())]
    return [*model.state_dict().values(), *(x for own in state for _, x in sorted(own.items()) if x is not None)]


def interrupt(step: Callable[[int], object], written: Callable[[], list[torch.Tensor]]) -> Counter[bool]:
    """How often a step that was interrupted had written: all (True) or nothing. `step` takes the number of a batch."""
    began = time.perf_counter()
    for _ in range(10):
        step(1)
    whole = (time.perf_counter() - began) / 10
    met = Counter[bool]()

    def raised(*_: object) -> None:
        raise KeyboardInterrupt

    own = signal.signal(signal.SIGALRM, raised)
    try:
        for k in range(TIMES):
            before = [x.clone() for x in written()]
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, whole * 1.2 * k / TIMES))
                step(k)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                changed = {not torch.equal(x, y) for x, y in zip(written(), before, strict=True)}
                assert len(changed) == 1
                met.update(changed)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, own)
        torch.set_grad_enabled(True)  # torch leaves it off where its own `no_grad` is interrupted at its end
        modes = torch._C._len_torch_dispatch_stack()
        for _ in range(modes):  # else all tests behind this one fail too
            torch._C._pop_torch_dispatch_stack()
    assert not modes, "interrupted while it was traced anew: no call of `step` may need that"
    return met
