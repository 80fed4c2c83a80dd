"""What compilers made in earlier runs of the tests is theirs, byte for byte, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import compiled

from weft.device.cuda.nvrtc import find_nvrtc
from weft.device.toolchain import find_compiler
from weft.errors import ToolchainError
from weft.ir.declined import Declined

TEXT = 'extern "C" int f() { return 7; }'
KERNEL = 'extern "C" __global__ void f(int* x) { *x = 7; }'


def test_a_text_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host, nvrtc = find_compiler(), find_nvrtc()
    assert not isinstance(host, Declined)
    assert not isinstance(nvrtc, Declined)
    plain = host.compile(TEXT).sha256, nvrtc.compile(KERNEL, arch="sm_80").sha256
    monkeypatch.setenv(compiled.VARIABLE, str(tmp_path))
    compiled.keep(monkeypatch, tmp_path)
    first = host.compile(TEXT).sha256, nvrtc.compile(KERNEL, arch="sm_80").sha256
    files = sorted(x for x in tmp_path.rglob("*") if x.is_file())
    assert first == plain and len(files) == 2
    again = host.compile(TEXT).sha256, nvrtc.compile(KERNEL, arch="sm_80").sha256
    assert again == plain and sorted(x for x in tmp_path.rglob("*") if x.is_file()) == files
    for file in files:  # it is the file that is read
        log, _, _ = file.read_bytes().partition(b"\0")
        file.write_bytes(log + b"\0other bytes")
    other = host.compile(TEXT).sha256, nvrtc.compile(KERNEL, arch="sm_80").sha256
    assert not set(other) & set(plain)


def test_other_options_are_another_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host, nvrtc = find_compiler(), find_nvrtc()
    assert not isinstance(host, Declined)
    assert not isinstance(nvrtc, Declined)
    monkeypatch.setenv(compiled.VARIABLE, str(tmp_path))
    compiled.keep(monkeypatch, tmp_path)
    host.compile(TEXT), host.compile(TEXT, ("-O2",))
    nvrtc.compile(KERNEL, arch="sm_80"), nvrtc.compile(KERNEL, arch="sm_90a")
    nvrtc.compile(KERNEL, arch="sm_90a", max_registers=32)
    assert sum(x.is_file() for x in tmp_path.rglob("*")) == 5


def test_what_was_refused_is_refused_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = find_compiler()
    assert not isinstance(host, Declined)
    monkeypatch.setenv(compiled.VARIABLE, str(tmp_path))
    compiled.keep(monkeypatch, tmp_path)
    for _ in range(2):
        with pytest.raises(ToolchainError):
            host.compile("no C++")
    assert not any(x.is_file() for x in tmp_path.rglob("*"))


def test_a_test_of_the_compilers_has_them_at_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = find_compiler()
    assert not isinstance(host, Declined)
    compiled.keep(monkeypatch, tmp_path)
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    host.compile(TEXT)
    assert not any(tmp_path.rglob("*"))


def test_every_library_has_its_own_globals() -> None:
    head, text = "static int n = 0;\n", 'extern "C" int count() { return ++n; }'
    first, second = (compiled.library(text, "-O0", head=head) for _ in range(2))
    assert [first.count(), first.count(), second.count()] == [1, 2, 1]
