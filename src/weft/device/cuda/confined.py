"""NVRTC in a process of its own, under limits of memory and time: for text that somebody else wrote.

A macro that doubles itself, a template that never ends or a text that crashes the compiler ends that process, and the
caller gets the reason. The process opens no file for the text: it has no include path, and callers hand it text without
`#include`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.device.cuda.resources import Resources, parse_resources, parse_warnings
from weft.errors import DeviceError
from weft.ir.declined import Declined

MEMORY_BYTES = 6 << 30
TIMEOUT_S = 30.0
MOST_TEXT_BYTES = 64 << 20
MOST_LOG = 1 << 16
_FLAGS = ("--std=c++17", "-default-device", "--no-cache")


@dataclass(frozen=True, slots=True)
class ConfinedJob:
    """One translation unit."""

    text: str
    arch: str
    """`sm_80` gives a cubin, `compute_80` PTX."""
    names: tuple[str, ...] = ()
    """Expressions whose lowered names are wanted, and whose instances are made: `&table`, `kernel<4>`."""
    lines: bool = False
    """Whether PTX says of which line it is."""


@dataclass(frozen=True, slots=True)
class ConfinedResult:
    """What became of it."""

    code: bytes
    """Cubin or PTX."""
    log: str
    seconds: float
    names: tuple[str, ...] = ()
    resources: tuple[tuple[str, Resources], ...] = ()
    """Of the entries of a cubin."""
    warnings: tuple[str, ...] = ()


def compile_confined(
    jobs: Sequence[ConfinedJob], *, memory_bytes: int = MEMORY_BYTES, timeout_s: float = TIMEOUT_S
) -> list[ConfinedResult | Declined]:
    """Compile all, one after the other, in one process; a text that is refused, or ends it, gives the reason.

    Raises:
        DeviceError: no NVRTC here [W301].
    """
    asked = {"jobs": [asdict(j) for j in jobs], "memory_bytes": memory_bytes, "cpu_s": int(timeout_s) + 5}
    data = json.dumps(asked).encode()
    if len(data) > MOST_TEXT_BYTES:
        return [Declined(f"over {MOST_TEXT_BYTES} bytes of text")] * len(jobs)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "weft.device.cuda.confined"]
    began = time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(data, timeout=timeout_s)
            over = False
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            over = True
    found: list[ConfinedResult | Declined] = []
    for line in out.split(b"\n"):
        if line.strip():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found.append(_result(json.loads(line)))
    if not over and process.returncode == 3:
        raise DeviceError(problem=err.decode("utf-8", "replace").strip()[-300:] or "NVRTC cannot be loaded")
    if over:
        reason = f"the compiler took more than {time.monotonic() - began:.0f} s and was ended"
    else:
        reason = (
            f"the compiler ran out of memory ({memory_bytes >> 20} MiB), out of time ({timeout_s:.0f} s), or crashed "
            f"(status {process.returncode})"
        )
    return found[: len(jobs)] + [Declined(reason)] * (len(jobs) - len(found))


def _result(raw: dict[str, str]) -> ConfinedResult | Declined:
    log = str(raw["log"])
    if raw["status"] != "0":
        return Declined(log or f"status {raw['status']}")
    return ConfinedResult(
        base64.b64decode(raw["code"]),
        log,
        float(raw["seconds"]),
        tuple(raw["names"].split("\n")) if raw["names"] else (),
        parse_resources(log),
        parse_warnings(log),
    )


def main() -> None:
    """Of the process: jobs from the standard input, a line of JSON for each to the standard output."""
    asked = json.loads(sys.stdin.buffer.read())
    try:
        from weft.device.cuda.nvrtc import find_nvrtc

        nvrtc = find_nvrtc()
        if isinstance(nvrtc, Declined):
            raise DeviceError(problem=nvrtc.reason)
        from cuda.bindings import nvrtc as api
    except (ImportError, DeviceError) as error:
        sys.stderr.write(str(error).splitlines()[0])
        sys.exit(3)
    # what is written to these is ours alone
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for what, most in (
        (resource.RLIMIT_AS, int(asked["memory_bytes"])),
        (resource.RLIMIT_CPU, int(asked["cpu_s"])),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 1 << 28),
    ):
        _, hard = resource.getrlimit(what)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (least, least))
    for job in asked["jobs"]:
        began = time.perf_counter()
        try:
            status, code, log, names = _compile(api, job)
        except MemoryError:
            status, code, log, names = 1, b"", "out of memory", list[str]()
        answer = {
            "status": str(status),
            "code": base64.b64encode(code).decode(),
            "log": log[:MOST_LOG],
            "names": "\n".join(names),
            "seconds": str(time.perf_counter() - began),
        }
        output.write(json.dumps(answer).encode() + b"\n")
        output.flush()


def _compile(n: Any, job: dict[str, Any]) -> tuple[int, bytes, str, list[str]]:
    arch = str(job["arch"])
    cubin = arch.startswith("sm_")
    options = [*_FLAGS, f"--gpu-architecture={arch}"]
    options += ["--ptxas-options=-v"] if cubin else []
    options += ["--generate-line-info"] if job["lines"] else []
    _, program = n.nvrtcCreateProgram(str(job["text"]).encode(), b"kernel.cu", 0, None, None)
    wanted = [str(x) for x in job["names"]]
    for name in wanted:
        n.nvrtcAddNameExpression(program, name.encode())
    (status,) = n.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = _bytes(n, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
    if int(status) != 0:
        return int(status), b"", log or str(status), []
    code = _bytes(n, program, "CUBIN" if cubin else "PTX")
    names = []
    for name in wanted:
        found, lowered = n.nvrtcGetLoweredName(program, name.encode())
        names.append(lowered.decode() if int(found) == 0 and lowered else "")
    return 0, code, log, names


def _bytes(api: Any, program: object, what: str) -> bytes:
    _, size = getattr(api, f"nvrtcGet{what}Size")(program)
    data = bytes(size)
    getattr(api, f"nvrtcGet{what}")(program, data)
    return data


if __name__ == "__main__":
    main()
