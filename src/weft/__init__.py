"""Weft: from a neural network to the fastest set of fused kernels that it can find and measure.

    exe = weft.compile(model, example_inputs)     # a torch module, an exported program or an ONNX file
    y = exe(x)
    exe.save("m.weft"); weft.load("m.weft")
    torch.compile(model, backend="weft")
    step = weft.compile_step(model, loss, optimizer, *example_inputs, target)

Names are resolved on first use (PEP 562), so that `import weft.runtime` does not load the compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.api import Compiled, compile, load  # noqa: A004 - the name users call
    from weft.errors import UserError, WeftError
    from weft.options import Options
    from weft.training import compile_step

__version__ = "0.1.0"
__all__ = ["Compiled", "Options", "UserError", "WeftError", "compile", "compile_step", "load"]

_HOME = {
    "Compiled": "weft.api",
    "compile": "weft.api",
    "compile_step": "weft.training",
    "load": "weft.runtime.loaded",
    "Options": "weft.options",
    "UserError": "weft.errors",
    "WeftError": "weft.errors",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    found = getattr(importlib.import_module(home), name)
    if name == "compile" and not _installed():
        # a source tree has no installed entry point; with one torch loads the backend, for seconds, if it is asked for
        importlib.import_module("weft.torch_backend").register()
    return found


def _installed() -> bool:
    from importlib import metadata  # a fifth of what `weft --help` takes

    return bool(metadata.entry_points(group="torch_dynamo_backends", name="weft"))
