"""`import_onnx`: reads an untrusted file in a process of its own and takes over only our own data from it."""

from __future__ import annotations

import base64
import importlib.util
import json
import mmap
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from weft.errors import LimitError
from weft.frontends.imported import Imported
from weft.frontends.onnx import errors, wire
from weft.frontends.onnx.errors import BindingError, GarbledModelError, ParserDiedError
from weft.frontends.onnx.external import ExternalFiles
from weft.frontends.onnx.limits import Limits, raised_by
from weft.frontends.onnx.names import shown
from weft.frontends.onnx.partition import Partition
from weft.frontends.onnx.pieces import Absent
from weft.ir.types import Array, DType

_LIMITS = Limits()
_NO_DIMS: Mapping[str, int] = MappingProxyType({})
_NO_DATA: Mapping[str, Array] = MappingProxyType({})
_SENT_ELEMENTS = 1 << 16
"""Larger example inputs lend their shapes only: a model is not specialised on so many values."""
_ANSWER_BYTES = 512 << 20


def import_onnx(
    source: Path | bytes,
    *,
    limits: Limits = _LIMITS,
    dims: Mapping[str, int] = _NO_DIMS,
    example_inputs: Sequence[Array] | Mapping[str, Array | None] | None = None,
    initializers: Mapping[str, Array] = _NO_DATA,
    on_data: bool = True,
) -> Imported:
    """An ONNX model as primitives. Opsets 6 to the newest that the installed onnx knows.

    Shapes: static. Symbolic sizes are taken from `dims` (by their names, those without one as `INPUT:AXIS`), else from
    the example inputs (one for each input, or by name; None: there is none), else they are 1 (with a note).
    Conditions: where an operator needs a run-time value (a shape, an axis, a condition) the graph is specialised on
    the example inputs' values and says so in `Imported.guards`; on many floats only with `on_data`.
    `initializers`: data that stand for those of the model's initializers of these names; of equal types and shapes,
    bf16 and 8-bit floats as the float32 that hold them.
    Cost: about 0.4 s to start the parsing process, then about 4 s per GB.

    Raises:
        ModelError: malformed, hostile or over a limit [W101-W114].
        UnsupportedError: nothing can run it, or it needs example inputs [W201-W203].
    """
    answer = _import(source, limits, dims, example_inputs, initializers, partitioned=False, on_data=on_data)
    assert isinstance(answer, Imported)
    return answer


def import_partitioned(
    source: Path | bytes,
    *,
    limits: Limits = _LIMITS,
    dims: Mapping[str, int] = _NO_DIMS,
    example_inputs: Sequence[Array] | Mapping[str, Array | None] | None = None,
    initializers: Mapping[str, Array] = _NO_DATA,
) -> Partition:
    """A model of which `import_onnx` cannot make one graph, as two partitions; ONNX Runtime must be installed.

    Raises:
        ModelError: as of `import_onnx`.
        UnsupportedError: nothing can run it [W201-W203].
    """
    answer = _import(source, limits, dims, example_inputs, initializers, partitioned=True)
    assert isinstance(answer, Partition)
    return answer


def _import(
    source: Path | bytes,
    limits: Limits,
    dims: Mapping[str, int],
    example_inputs: Sequence[Array] | Mapping[str, Array | None] | None,
    initializers: Mapping[str, Array],
    *,
    partitioned: bool,
    on_data: bool = False,
) -> Imported | Partition:
    request: dict[str, Any] = {
        "limits": asdict(limits),
        "dims": {str(k): _size(str(k), v) for k, v in dims.items()},
        "examples": _examples(example_inputs),
        "partitioned": partitioned,
        "on_data": on_data,
    }
    model, directory = open_model(source, limits)
    named = "" if directory is None else shown(Path(source).name)  # type: ignore[arg-type]
    request.update(
        directory=None if directory is None else str(directory),
        file_name=named,
        external_estimate=0 if directory is None else _beside(directory),
    )
    tensors, given, trying = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("tensors", "given", "trying"))
    installed = importlib.util.find_spec("onnxruntime") is not None
    try:
        request.update(
            model=model, tensors=tensors, given=given, trying=trying, initializers=_lend(initializers, given)
        )
        request["runtime"] = "" if partitioned and installed else (Absent.YET if installed else Absent.INSTALLED).name
        answer = _ask(request, limits, (model, tensors, given, trying))
        if "wants" in answer:  # few models do, and it takes longer to start with it
            request["runtime"] = ""
            answer = _ask(request, limits, (model, tensors, given, trying))
        return _take(answer, tensors, request["directory"], request["file_name"], limits)
    finally:
        for file in (model, tensors, given, trying):
            os.close(file)


def _lend(initializers: Mapping[str, Array], file: int) -> list[dict[str, Any]]:
    """Write arrays one behind the other; give back what each is and where it lies."""
    table: list[dict[str, Any]] = []
    with open(file, "wb", closefd=False) as out:
        for name, array in initializers.items():
            at = out.tell()
            out.write(np.ascontiguousarray(array).tobytes())
            table.append({"name": name, "type": array.dtype.str, "shape": list(array.shape), "offset": at})
    return table


def open_model(source: Path | bytes, limits: Limits) -> tuple[int, Path | None]:
    """A descriptor of the model's bytes, to be closed, and the directory beneath which its data may lie.

    Raises:
        GarbledModelError: no regular file that can be opened [W101].
        LimitError: it is too large [W105].
    """
    if not isinstance(source, (bytes, bytearray, memoryview)):
        path = Path(source)
        # not resolved: external names lie beside the name given
        return _open_model(path, limits), Path(os.path.abspath(path)).parent
    model = os.memfd_create("model", os.MFD_CLOEXEC)
    with open(model, "wb", closefd=False) as out:
        out.write(source)
    return model, None


def quiet_environment() -> dict[str, str]:
    """What a process that reads untrusted bytes is told: where Python's modules are, and not to start threads."""
    return {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _size(name: str, given: object) -> int:
    if isinstance(given, Integral):
        return int(given)
    problem = f"size {given!r} of dimension '{shown(name)}' is no whole number"
    raise BindingError(problem=problem, remedy="give whole numbers")


def _examples(given: Sequence[Array] | Mapping[str, Array | None] | None) -> Any:
    if isinstance(given, Mapping):
        return {str(k): None if x is None else _example(f"'{shown(k)}'", x) for k, x in given.items()}
    return None if given is None else [_example(i, x) for i, x in enumerate(given)]


def _example(position: int | str, x: Array) -> dict[str, Any]:
    array = np.asarray(x)
    try:
        dtype = DType.from_numpy(array.dtype)
    except KeyError:
        raise BindingError(
            where=f"input {position}",
            problem=f"the example is {array.dtype}, which Weft has no type for",
            remedy="give an example of the type that the model declares",
        ) from None
    small = array.size <= _SENT_ELEMENTS
    return {
        "dtype": dtype.value,
        "shape": list(array.shape),
        "data": base64.b64encode(np.asarray(array, order="C").tobytes()).decode("ascii") if small else None,
    }


def _open_model(path: Path, limits: Limits) -> int:
    where = shown(path.name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # a name with a NUL is no OSError
        told = error.strerror if isinstance(error, OSError) else str(error)
        raise GarbledModelError(
            where=where, problem=f"the model cannot be opened: {told}", remedy="check the path"
        ) from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise GarbledModelError(where=where, problem="the model is not a regular file", remedy="give an .onnx file")
    if status.st_size > limits.model_bytes:
        os.close(fd)
        raise LimitError(
            where=where,
            problem=f"the model has {status.st_size} bytes, the limit is {limits.model_bytes}",
            remedy=raised_by("model_bytes"),
        )
    return fd


def _beside(directory: Path) -> int:
    """Bytes of the regular files in the directory: mapped external data count as address space."""
    total = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
    return total


def _ask(request: Any, limits: Limits, keep: tuple[int, ...]) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "weft.frontends.onnx.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=keep,
        env=quiet_environment(),
        cwd="/",
        start_new_session=True,
    )
    wall = 4 * limits.parse_cpu_s + 30
    trying = request["trying"]
    try:
        out, _ = process.communicate(json.dumps(request).encode(), timeout=wall)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise _died(f"reading the model took more than {wall} s", trying) from None
    except BaseException:
        process.kill()
        process.communicate()
        raise
    status = process.returncode
    if status < 0 and -status in (signal.SIGXCPU, signal.SIGKILL):
        raise _died(
            f"reading the model took more than {limits.parse_cpu_s} s of processor time, or too much memory", trying
        )
    if status != 0:
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        raise _died(f"the process that reads the model ended with {how}", trying)
    if len(out) > _ANSWER_BYTES:
        raise _died("the answer of the process that reads the model is too long")
    try:
        return json.loads(out)
    except ValueError:
        raise _died("the process that reads the model gave no answer") from None


def _died(problem: str, trying: int | None = None) -> ParserDiedError:
    """`trying`: who was tried by ONNX Runtime then, if anyone."""
    remedy = "the file is hostile, damaged or very large; if you trust it, give it more with"
    where = os.pread(trying, 400, 0).decode("utf-8", "replace") if trying is not None else ""
    if where:
        problem = f"{problem}, while ONNX Runtime tried this operator"
    remedy = f"{remedy} --parse-timeout or --max-parse-memory"
    return ParserDiedError(where=shown(where), problem=problem, remedy=remedy)


def _take(answer: Any, tensors: int, directory: str | None, file_name: str, limits: Limits) -> Imported | Partition:
    if "error" in answer:
        kind = errors.ALL.get(answer["error"])
        if kind is None:
            raise _died("an answer of unknown kind")
        raise kind(where=str(answer["where"]) or file_name, **answer["details"])
    if "unexpected" in answer:
        raise ParserDiedError(
            problem=f"reading the model failed: {shown(answer['unexpected'])}",
            remedy="the file is damaged, or this is a bug in Weft: please report it",
        )
    size = os.fstat(tensors).st_size
    block = memoryview(mmap.mmap(tensors, size, mmap.MAP_PRIVATE, mmap.PROT_READ)) if size else memoryview(b"")
    files = ExternalFiles(Path(directory) if directory is not None else None, limits)
    try:
        imported = wire.from_message(answer["imported"], block, files.read)
        told = answer["partition"]
        return imported if told is None else wire.partition_from_message(imported, told, block)
    except wire.WireError as error:
        raise _died(f"an answer that is not consistent ({shown(error)})") from None
