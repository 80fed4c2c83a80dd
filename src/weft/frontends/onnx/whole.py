"""The whole model by ONNX Runtime on the CPU: what its user had before, as a baseline and as an answer.

The file is untrusted and ONNX Runtime is native code, so a confined process (`trial`) makes a session of it and runs it
first, under limits of time and memory. This process is given the same bytes, with all data inside, and never a path.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from weft.errors import WeftError
from weft.frontends.onnx.isolated import open_model, quiet_environment
from weft.frontends.onnx.limits import Limits
from weft.frontends.onnx.trial import session_of
from weft.ir.declined import Declined
from weft.ir.types import TensorType


@final
class OnnxRuntimeModel:
    """A model that ONNX Runtime runs: tensors in, fresh tensors out, on the CPU. Safe on many threads."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._names = [i.name for i in session.get_inputs()]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Run it.

        Raises:
            RuntimeError: ONNX Runtime fails.
        """
        return self.prepared(*tensors)()

    def prepared(self, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Runs it on these inputs, which are bound already: what is timed is ONNX Runtime."""
        feed = {n: t.detach().contiguous().numpy() for n, t in zip(self._names, tensors, strict=True)}

        def run() -> list[torch.Tensor]:
            try:
                return [torch.from_numpy(np.asarray(y)) for y in self._session.run(None, feed)]
            except Exception as error:  # the runtime's own classes share no public base
                raise RuntimeError(f"ONNX Runtime failed: {_line(error)}") from error

        return run


def onnxruntime_model(
    source: Path | bytes, types: Sequence[TensorType], results: int, *, limits: Limits, threads: int, seconds: float
) -> OnnxRuntimeModel | Declined:
    """The model as ONNX Runtime runs it, once a process of its own has run it on inputs of those `types`; or why not.

    Args:
        source: what `import_onnx` took.
        types: of the inputs, in order.
        results: number of outputs.
        limits: as of the import.
        threads: of the session, at least 1.
        seconds: that the trial may take.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return Declined("onnxruntime is not installed")
    if odd := next((t for t in types if t.dtype.is_emulated), None):
        return Declined(f"NumPy has no {odd.dtype.value}")
    inlined = os.memfd_create("inlined", os.MFD_CLOEXEC)
    model = -1
    try:
        model, directory = open_model(source, limits)
        request = {
            "limits": asdict(limits), "model": model, "inlined": inlined, "threads": threads, "results": results,
            "directory": None if directory is None else str(directory),
            "inputs": [[t.dtype.value, list(t.shape)] for t in types],
        }  # fmt: skip
        problem = _tried(request, (model, inlined), seconds)
        if problem:
            return Declined(problem)
        where = inlined if os.fstat(inlined).st_size else model
        data = os.pread(where, os.fstat(where).st_size, 0)
        return OnnxRuntimeModel(session_of(data, threads))
    except WeftError as error:
        return Declined(str(error).splitlines()[0][:200])
    except Exception as error:  # as above
        return Declined(f"ONNX Runtime refuses the model: {_line(error)}")
    finally:
        os.close(inlined)
        if model >= 0:
            os.close(model)


def _tried(request: Any, keep: tuple[int, ...], seconds: float) -> str:
    """Why the model does not run; empty: it does."""
    command = [sys.executable, "-P", "-m", "weft.frontends.onnx.trial"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=keep,
        env=quiet_environment(), cwd="/", start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(json.dumps({**request, "cpu_s": max(1, int(4 * seconds))}).encode(), seconds)
    except subprocess.TimeoutExpired:
        return f"ONNX Runtime took more than {seconds:.1f} s to run the model once"
    finally:
        process.kill()
        process.communicate()
    try:
        return str(json.loads(out)["problem"])[:300]
    except (ValueError, KeyError, TypeError):
        return f"ONNX Runtime ends the process that runs the model (status {process.returncode})"


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
