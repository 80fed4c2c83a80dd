"""A confined process that runs a whole model once by ONNX Runtime, before another process does.

Run as `python -m weft.frontends.onnx.trial`: one JSON request on standard input, `{"problem": text}` on standard
output, empty where all went well. Data outside of the model are put into it under the rules of `external`, and the
whole is written to the descriptor `inlined`.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import WeftError
from weft.frontends.onnx import confine
from weft.frontends.onnx.check import parse
from weft.frontends.onnx.external import ExternalFiles
from weft.frontends.onnx.limits import Limits
from weft.frontends.onnx.tensors import TensorReader, tensors_of_model
from weft.ir.types import DType

MOST_BYTES = 1 << 30
"""Of a model with all its data: protocol buffers end at 2 GiB, and the session holds the weights once more."""


def session_of(model: bytes | memoryview, threads: int) -> Any:
    """A session on so many threads, which stop spinning when a run ends. Raises whatever ONNX Runtime does."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    options.add_session_config_entry("session.force_spinning_stop", "1")  # they would be in the way of what runs next
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(bytes(model), options, providers=["CPUExecutionProvider"])


def inline(data: memoryview, directory: str | None, limits: Limits) -> bytes | None:
    """The model with all its data inside; None: they are inside already.

    Raises:
        ModelError: what `external` refuses [W111-W113].
        ValueError: too large.
    """
    model = parse(data, limits)
    reader = TensorReader(ExternalFiles(Path(directory) if directory is not None else None, limits), len(data))
    total = len(data)
    for where, tensor in tensors_of_model(model):
        part = reader.place(tensor, where)
        total += 0 if part is None else part.length
        if total > MOST_BYTES:
            raise ValueError(f"the model and its data are over {MOST_BYTES} bytes")
        reader.inline(tensor, where)
    return model.SerializeToString() if total > len(data) else None


def serve(request: Any) -> str:
    """Why the model does not run; empty: it does."""
    import onnxruntime

    _ = onnxruntime.get_available_providers()  # imported while files can still be opened
    rng = np.random.default_rng(0)
    size = os.fstat(request["model"]).st_size
    if size > MOST_BYTES:
        return f"the model is over {MOST_BYTES} bytes"
    limits = Limits(**request["limits"])
    # weights: in the file, in the message, in its text, in the session, and packed for its products
    confine.limit(limits.parse_memory_bytes + 6 * MOST_BYTES, request["cpu_s"])
    confine.confine(limits.model_root or request["directory"])
    data = memoryview(mmap.mmap(request["model"], size, mmap.MAP_PRIVATE, mmap.PROT_READ)) if size else memoryview(b"")
    whole = inline(data, request["directory"], limits)
    if whole is not None:
        with open(request["inlined"], "wb", closefd=False) as out:
            out.write(whole)
    session = session_of(data if whole is None else whole, request["threads"])
    given = session.get_inputs()
    if len(given) != len(request["inputs"]):
        return f"ONNX Runtime wants {len(given)} inputs, Weft {len(request['inputs'])}"
    feed = {}
    for info, (dtype, shape) in zip(given, request["inputs"], strict=True):
        values = np.abs(rng.standard_normal(shape)) if not DType(dtype).is_float else rng.standard_normal(shape)
        feed[info.name] = values.astype(DType(dtype).numpy)
    made = session.run(None, feed)
    if len(made) != request["results"] or not all(isinstance(y, np.ndarray) for y in made):
        return f"ONNX Runtime gives {len(made)} results, Weft {request['results']}"
    return ""


def main() -> int:
    """Answer on standard output, which nothing else may write to."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.buffer.read())
    try:
        problem = serve(request)
    except WeftError as error:
        problem = str(error).splitlines()[0]
    except Exception as error:  # whatever a hostile file provokes is an answer too
        problem = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    with open(answer_to, "wb") as out:
        out.write(json.dumps({"problem": problem[:300]}).encode())
    return 0


if __name__ == "__main__":
    code = main()
    os._exit(code)
