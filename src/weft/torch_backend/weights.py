"""Parameters and buffers that a plan holds as constants, and how a change of one is noticed.

A tensor is unchanged while it is the same object, in the same memory, with the same version counter: that covers
in-place operators, `load_state_dict`, `.data = ...` and a parameter that was replaced. torch's fused optimizers pass
the counter by (`Adam(..., fused=True)`), so that a step of any optimizer counts as a change of its parameters. Other
writes that pass the counter by (`p.data.mul_(2)`, NumPy) are caught on the CPU by a sample of elements; one that leaves
every sampled element as it was is not, and neither is any such write on another device, or an optimizer's step that a
CUDA graph replays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import fx
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from weft.ir.types import Array

MAX_RENEWALS = 2
"""How often a changed tensor is compiled in again before it becomes an argument for good."""
_SAMPLES = 8
_WHOLE = 64
"""Up to so many elements, all are compared."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def static_inputs(gm: fx.GraphModule, example_inputs: Sequence[object]) -> dict[int, torch.Tensor]:
    """Parameters and buffers of modules among the arguments of a graph of dynamo, by position."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    if len(placeholders) != len(example_inputs):
        return {}
    found = {}
    for position, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        static = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
        if static and isinstance(value, torch.Tensor) and can_watch(value):
            found[position] = value
    return found


MOST_INTEGERS = 1 << 20
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def given_integers(example_inputs: Sequence[object]) -> dict[int, torch.Tensor]:
    """Integers among the arguments of a graph of dynamo that have values, by position; large ones left out."""
    return {
        k: x
        for k, x in enumerate(example_inputs)
        if type(x) is torch.Tensor and x.dtype in _INTEGERS and x.numel() <= MOST_INTEGERS
    }


def can_watch(value: torch.Tensor) -> bool:
    """Whether a change of this tensor can be noticed: dense, with bits and a version counter of its own."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    lazy = value.is_conj() or value.is_neg() or value.is_quantized
    # tensors that were made in inference mode have no counter
    return plain and not lazy and not value.is_inference() and value.itemsize in _BITS and _is_dense(value)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory without overlap, in any order of the dimensions."""
    reach = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride != reach:
            return False
        reach *= max(size, 1)
    return True


def traced_positions(gm: fx.GraphModule, statics: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Arguments of dynamo's graph that one of aot_autograd does not write, by their positions there.

    aot_autograd may leave out, merge and add arguments.
    """
    found = {}
    for position, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
        source = node.meta.get("desc")
        written = any(str(u.target) == "aten.copy_.default" and u.args[0] is node for u in node.users)
        if type(source).__name__ == "PlainAOTInput" and source.idx in statics and not written:
            found[position] = statics[source.idx]
    return found


@final
class _Steps:
    """Steps of all optimizers of this process since this was made, and which parameters were in the latest ones."""

    def __init__(self) -> None:
        self.count = 0
        self._last: dict[int, int] = {}
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        count = self.count + 1
        # by `id`, for an optimizer may be gone when somebody asks; one that is used again costs one compilation
        self._last |= {id(p): count for group in optimizer.param_groups for p in group["params"]}
        self.count = count

    def written_after(self, tensor: torch.Tensor, count: int) -> bool:
        """Whether an optimizer of this tensor made a step after that many steps."""
        return self._last.get(id(tensor), 0) > count


_STEPS = _Steps()


@final
class Weights:
    """Tensors as they were when this was made. Holds them, so that their memory is not given to others."""

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self._steps = _STEPS.count
        self._marks = [(k, t, t._version, t.data_ptr()) for k, t in tensors.items()]
        self._memory = [t.detach() for t in tensors.values()]
        self._samples = [_Samples(views) for views in _by_width(tensors)]

    def changed(self, arguments: Sequence[Any]) -> frozenset[int]:
        """Positions whose argument is another tensor, or the same with other contents."""
        found = {
            k
            for k, tensor, version, address in self._marks
            if arguments[k] is not tensor or tensor._version != version or tensor.data_ptr() != address
        }
        for samples in self._samples:
            if not samples.hold():
                found |= samples.differing()
        if self._steps != (count := _STEPS.count):
            written = {k for k, tensor, _, _ in self._marks if _STEPS.written_after(tensor, self._steps)}
            found |= written
            if not written:
                self._steps = count
        return frozenset(found)


def _by_width(tensors: Mapping[int, torch.Tensor]) -> list[dict[int, Array]]:
    """Sampled elements of the tensors on the CPU as views of their bits, by element size."""
    groups: dict[int, dict[int, Array]] = {}
    for k, t in tensors.items():
        if t.device.type == "cpu" and t.numel() > 0:
            flat: Array = t.detach().as_strided((t.numel(),), (1,)).view(_BITS[t.itemsize]).numpy()
            step = 1 if t.numel() <= _WHOLE else t.numel() // _SAMPLES
            groups.setdefault(t.itemsize, {})[k] = flat[::step]
    return list(groups.values())


@final
class _Samples:
    """Sampled elements of several tensors of one element size."""

    def __init__(self, views: Mapping[int, Array]) -> None:
        self._views = dict(views)
        self._was = {k: v.copy() for k, v in views.items()}
        self._bytes = self._now()

    def _now(self) -> bytes:
        return np.concatenate(list(self._views.values())).tobytes()

    def hold(self) -> bool:
        """Whether every sampled element has the bits it had."""
        return self._now() == self._bytes

    def differing(self) -> set[int]:
        """Positions of which an element differs."""
        return {k for k, v in self._views.items() if not np.array_equal(v, self._was[k])}
