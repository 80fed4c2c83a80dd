"""What `weft bench` times Weft against: each peer as something to call, or why there is none."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.cli.show import visible
from weft.errors import OptionError, UnsupportedError
from weft.frontends.imported import Imported
from weft.frontends.onnx.limits import Limits
from weft.frontends.onnx.whole import onnxruntime_model
from weft.frontends.torch.dtypes import EMULATED, FROM_TORCH
from weft.ir.declined import Declined
from weft.ir.types import TensorType
from weft.options import Options
from weft.tune.tolerance import gate_b

Tensors = Sequence[torch.Tensor]
TRIAL_S = 60.0
"""What ONNX Runtime may take for the model in a process of its own, before it runs in this one."""


@dataclass(frozen=True)
class Peer:
    """Something that computes the model."""

    run: Callable[[], Tensors] | None
    """None: it cannot; `note` says why."""
    note: str = ""


def check_peers(names: Sequence[str], device: str) -> None:
    """Told before anything is tuned: peers that are not installed, or that are none on this device.

    Raises:
        OptionError: ONNX Runtime is asked for and not installed [W001].
    """
    if "onnxruntime" in names and device == "cpu" and importlib.util.find_spec("onnxruntime") is None:
        raise OptionError(option="--against", problem="ONNX Runtime is not installed: `pip install onnxruntime`")


def onnxruntime_peer(model: Path, inputs: Tensors, results: int, limits: Limits) -> Peer:
    """The ONNX file as it stands, on the CPU, with as many threads as torch.

    The runtime is given bytes with all data inside, read under the rules for untrusted files, and never a path; a
    confined process runs them first.

    Raises:
        OptionError: ONNX Runtime is not installed, or refuses the model [W001].
    """
    if any(x.is_cuda for x in inputs):
        return Peer(None, "ONNX Runtime is a peer on the CPU only")
    types = [TensorType(FROM_TORCH[x.dtype], tuple(x.shape)) for x in inputs]
    threads = torch.get_num_threads()
    made = onnxruntime_model(model, types, results, limits=limits, threads=threads, seconds=TRIAL_S)
    if isinstance(made, Declined):
        raise OptionError(option="--against", problem=visible(made.reason, 200))
    return Peer(made.prepared(*inputs))


def torch_peers(names: Sequence[str], imported: Imported, inputs: Tensors) -> dict[str, Peer]:
    """`eager`: the model's operators through ATen, one call each; `inductor`: the same module through torch.compile.

    `max-autotune` is its mode of that name, without graphs of its own: all peers are recorded alike.
    A peer that is not one call per operator says so by the operators' names.
    """
    from weft.generate.library.eager import eager_model

    try:
        model = eager_model(imported.graph)
        for tensor in inputs[:1]:
            model.module.to(tensor.device)
    except UnsupportedError as error:
        reason = visible(str(error).splitlines()[0], 200)
        return dict.fromkeys(names, Peer(None, f"no baseline of torch's own operators: {reason}"))
    parts = ", ".join(f"{n} {visible(op)}" for op, n in model.parts.items())
    note = f"{model.operators} operators, one ATen call each" + (f", but several for {parts}" if parts else "")
    found = {}
    for name in names:
        module: Callable[..., Tensors] = model.module
        if name == "inductor":
            module = torch.compile(model.module, dynamic=False)
        elif name == "max-autotune":
            module = torch.compile(model.module, dynamic=False, mode="max-autotune-no-cudagraphs")
        found[name] = _tried(module, inputs, note)
    return found


def _tried(module: Callable[..., Tensors], inputs: Tensors, note: str) -> Peer:
    """The module as something to call, on a GPU recorded into a CUDA graph."""

    def run() -> Tensors:
        with torch.no_grad():
            return module(*inputs)

    try:
        run()
    except Exception as error:  # whatever torch and its compilers raise
        return Peer(None, f"fails: {type(error).__name__}: {visible(_first_line(error), 200)}")
    if not any(x.is_cuda for x in inputs):
        return Peer(run, note)
    from weft.platform.cuda.captured import capture

    captured = capture(module, inputs, Options.from_environment(os.environ))
    if isinstance(captured, Declined):
        return Peer(run, f"{note}; not in a CUDA graph: {visible(captured.reason, 200)}")
    return Peer(captured.replay, f"{note}; in a CUDA graph")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def disagreement(got: Tensors, want: Tensors) -> str:
    """How a peer's outputs differ from Weft's; empty within the limits of the tolerance table."""
    if len(got) != len(want):
        return f"gives {len(got)} outputs, not {len(want)}"
    for position, (mine, theirs) in enumerate(zip(want, got, strict=True)):
        x, y = _wide(mine), _wide(theirs)
        if x.shape != y.shape:
            return f"output {position} has shape {list(y.shape)}, not {list(x.shape)}"
        kind = FROM_TORCH[mine.dtype]
        found = gate_b(kind, got=y, want=x)
        if not found.ok:
            return f"output {position}: {found.outside:.2%} of the elements differ from Weft's"
    return ""


def _wide(tensor: torch.Tensor) -> Any:
    return (tensor.float() if tensor.dtype in EMULATED else tensor).detach().cpu().numpy()
