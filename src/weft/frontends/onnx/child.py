"""The parsing process: reads one request from standard input, answers with one JSON document on standard output.

Run as `python -m weft.frontends.onnx.child`. Tensors go into the descriptor that the request names. Everything
that reads the model's bytes (protobuf, ONNX's inference) runs here, after `confine`.
"""

from __future__ import annotations

import base64
import json
import math
import mmap
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import WeftError
from weft.frontends.onnx import confine, errors
from weft.frontends.onnx.importer import ExampleInput, Examples
from weft.frontends.onnx.limits import Limits
from weft.frontends.onnx.operators import HANDLERS
from weft.frontends.onnx.partition import Partition
from weft.frontends.onnx.pieces import Absent, Runtime, RuntimeWantedError
from weft.frontends.onnx.read import Given, read_model, read_partition
from weft.frontends.onnx.wire import partition_to_message, to_message
from weft.ir.types import Array, DType


def _examples(entries: Any) -> Examples | None:
    if isinstance(entries, dict):
        return {name: None if e is None else _example(e) for name, e in entries.items()}
    return None if entries is None else [_example(e) for e in entries]


def _example(entry: Any) -> ExampleInput:
    dtype, shape = DType(entry["dtype"]), tuple(entry["shape"])
    data = entry["data"]
    if data is None:
        return ExampleInput(dtype, shape, None)
    return ExampleInput(dtype, shape, np.frombuffer(base64.b64decode(data), dtype.numpy).reshape(shape))


def _warm(runtime: Absent | None) -> None:
    """Import what is imported late, while files can still be opened. `runtime`: None where it is to be here."""
    import encodings.idna
    import unicodedata

    import onnx.checker
    import onnx.shape_inference

    _ = (encodings.idna, unicodedata, onnx.checker, onnx.shape_inference, HANDLERS)
    onnx.defs.get_schema("Relu", 14, "")
    if runtime is None:
        import numpy.random
        import onnxruntime

        _ = (onnxruntime.get_available_providers(), numpy.random.default_rng(0))


def serve(request: Any) -> Any:
    """The answer to one request."""
    limits = Limits(**request["limits"])
    size = os.fstat(request["model"]).st_size
    directory = request["directory"]
    readable = limits.model_root or directory
    cpu = limits.parse_cpu_s + size // (100 << 20) + limits.external_bytes // (1 << 40)
    confine.limit(
        limits.parse_memory_bytes + 4 * (size + os.fstat(request["given"]).st_size) + request["external_estimate"], cpu
    )
    confine.confine(readable)
    data = mmap.mmap(request["model"], size, mmap.MAP_PRIVATE, mmap.PROT_READ) if size else b""
    given: Given = {
        "directory": Path(directory) if directory is not None else None,
        "limits": limits,
        "dims": request["dims"],
        "examples": _examples(request["examples"]),
        "file_name": request["file_name"],
        "initializers": _given(request),
        "runtime": _absent(request) or Runtime(request["trying"], limits.parse_memory_bytes // 4),
    }
    rest: Partition | None = None
    try:
        if request["partitioned"]:
            rest, external = read_partition(memoryview(data), **given)
            imported = rest.compiled
        else:
            imported, external = read_model(memoryview(data), **given, on_data=request["on_data"])
    except RuntimeWantedError:
        return {"wants": "runtime"}
    except WeftError as error:
        name = type(error).__name__
        if name not in errors.ALL:
            return _unexpected(error)
        details = {k: v if isinstance(v, (int, float)) else str(v) for k, v in error.details.items()}
        return {"error": name, "where": error.where, "details": details}
    except Exception as error:  # whatever a hostile file provokes is an answer too
        return _unexpected(error)
    document, block, end = to_message(imported, external)
    with open(request["tensors"], "wb", closefd=False) as out:
        for offset, array in block:
            out.seek(offset)
            flat: Any = np.asarray(array, order="C").reshape(-1).view(np.uint8)
            out.write(flat)
        out.truncate(end)
        if rest is not None:
            out.seek(end)
            out.write(rest.rest)
    return {"imported": document, "partition": None if rest is None else partition_to_message(rest, end)}


def _given(request: Any) -> dict[str, Array]:
    """Data that the caller gives for initializers."""
    size = os.fstat(request["given"]).st_size
    block = mmap.mmap(request["given"], size, mmap.MAP_PRIVATE, mmap.PROT_READ) if size else b""
    found = {}
    for g in request["initializers"]:
        count = math.prod(g["shape"])
        found[g["name"]] = np.frombuffer(block, g["type"], count, g["offset"]).reshape(g["shape"])
    return found


def _absent(request: Any) -> Absent | None:
    """Why ONNX Runtime is not here; None: it is."""
    return Absent[request["runtime"]] if request["runtime"] else None


def _unexpected(error: BaseException) -> Any:
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    return {"unexpected": f"{type(error).__name__} in {place}: {str(error)[:200]}"}


def main() -> int:
    """Answer on standard output, which nothing else may write to."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.buffer.read())
    _warm(_absent(request))
    answer = json.dumps(serve(request)).encode()
    with open(answer_to, "wb") as out:
        out.write(answer)
    return 0


if __name__ == "__main__":
    code = main()
    # No finalisers: freeing a large message takes longer than everything after it.
    os._exit(code)
