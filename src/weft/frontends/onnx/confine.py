"""What the parsing process gives up before it looks at a byte: memory, time, files, network, other programs."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct

_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM = 1
_DENIED = {
    # execve execveat fork vfork ptrace kill socket connect bind unlink unlinkat rename renameat renameat2 mkdir mkdirat
    "x86_64": (0xC000003E, (59, 322, 57, 58, 101, 62, 41, 42, 49, 87, 263, 82, 264, 316, 83, 258)),
    # execve execveat ptrace kill socket connect bind unlinkat renameat renameat2 mkdirat
    "aarch64": (0xC00000B7, (221, 281, 117, 129, 198, 203, 200, 35, 38, 276, 34)),
}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_ALL_V1 = (1 << 13) - 1
_PATH_BENEATH = 1


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Resource limits of this process; a lower limit that is already there stays."""
    for what, wanted in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(what, (value, value))


def confine(readable: str | None) -> tuple[str, ...]:
    """Deny the network, new programs and every file but those beneath `readable`; names of what took effect.

    Best effort: kernels without Landlock or seccomp are still held by the checks in `external` and by `limit`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return ()
    done = []
    if _landlock(libc, readable):
        done.append("landlock")
    if _seccomp(libc):
        done.append("seccomp")
    return tuple(done)


def _landlock(libc: ctypes.CDLL, readable: str | None) -> bool:
    rules = ctypes.create_string_buffer(struct.pack("=Q", _ALL_V1))
    fd = libc.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(8), 0)
    if fd < 0:
        return False
    try:
        if readable is not None:
            parent = os.open(readable, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            beneath = ctypes.create_string_buffer(struct.pack("=Qi", _READ_FILE | _READ_DIR, parent))
            added = libc.syscall(_LANDLOCK_ADD, fd, _PATH_BENEATH, beneath, 0)
            os.close(parent)
            if added != 0:
                return False
        return bool(libc.syscall(_LANDLOCK_SELF, fd, 0) == 0)
    except OSError:
        return False
    finally:
        os.close(fd)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _seccomp(libc: ctypes.CDLL) -> bool:
    known = _DENIED.get(platform.machine())
    if known is None:
        return False
    audit_arch, denied = known
    load, equal, give = 0x20, 0x15, 0x06
    # wrong architecture: allow, since the numbers below would mean other calls
    code = [(load, 0, 0, 4), (equal, 1, 0, audit_arch), (give, 0, 0, _ALLOW), (load, 0, 0, 0)]
    for k, number in enumerate(denied):
        code.append((equal, len(denied) - k, 0, number))
    code += [(give, 0, 0, _ALLOW), (give, 0, 0, _ERRNO | _EPERM)]
    raw = b"".join(struct.pack("=HBBI", *c) for c in code)
    buffer = ctypes.create_string_buffer(raw, len(raw))
    program = _Program(len(code), ctypes.cast(buffer, ctypes.c_void_p))
    return bool(libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) == 0)
