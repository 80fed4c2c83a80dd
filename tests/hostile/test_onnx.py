"""Hostile ONNX files: each is refused by name or made harmless; nothing crashes, hangs or leaves its directory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.hostile import onnx_files as files
from tests.slow import few

from weft.errors import LimitError, ModelError, UnsupportedError
from weft.frontends.onnx import Limits, import_onnx
from weft.frontends.onnx.errors import ExternalPathError, ParserDiedError
from weft.frontends.onnx.importer import ExampleInput
from weft.frontends.onnx.read import read_model
from weft.ir.types import DType

QUICK = Limits(parse_cpu_s=5, nodes=20_000)


def raw(model: Any) -> bytes:
    return model if isinstance(model, bytes) else model.SerializeToString()


def check_message(error: Any) -> None:
    """One line that says where and what, one that says what to do; no control characters."""
    text = str(error)
    lines = text.splitlines()
    assert 2 <= len(lines) <= 4
    assert error.code in lines[0]
    assert lines[1].strip()
    assert all(c.isprintable() for line in lines for c in line)
    assert len(text) < 1500
    assert "Traceback" not in text


@pytest.mark.parametrize("name", files.MODELS)
def test_refused_in_process(name: str) -> None:
    code, make = files.MODELS[name]
    start = time.monotonic()
    with pytest.raises((ModelError, UnsupportedError)) as caught:
        read_model(raw(make()), limits=QUICK)
    assert time.monotonic() - start < 20
    assert caught.value.code == code or not code, str(caught.value)
    check_message(caught.value)


ISOLATED = (
    "garbage", "truncated", "nested messages", "two data fields", "dimensions that wrap to 0", "cycle",
    "wrong attribute type", "3,000 nested calls", "2^40 operators", "17 nested Ifs", "string tensor", "huge range",
)  # fmt: skip


@pytest.mark.parametrize("name", few(ISOLATED, 4))
def test_refused_across_processes(name: str) -> None:
    code, make = files.MODELS[name]
    with pytest.raises((ModelError, UnsupportedError)) as caught:
        import_onnx(raw(make()), limits=QUICK)
    assert caught.value.code == code or not code, str(caught.value)
    check_message(caught.value)


@pytest.mark.parametrize("name", files.EXTERNAL)
def test_external_data_refused(name: str, tmp_path: Path) -> None:
    code, prepare, make = files.EXTERNAL[name]
    root = tmp_path / "model"
    root.mkdir()
    prepare(root)
    with pytest.raises(ModelError) as caught:
        read_model(raw(make(root)), directory=root)
    assert caught.value.code == code, str(caught.value)
    assert "initializer 'w'" in str(caught.value)
    check_message(caught.value)


@pytest.mark.parametrize("name", ["symbolic link", "FIFO", "absolute", "unknown key", "offset past the end"])
def test_external_data_refused_across_processes(name: str, tmp_path: Path) -> None:
    code, prepare, make = files.EXTERNAL[name]
    root = tmp_path / "model"
    root.mkdir()
    prepare(root)
    (root / "m.onnx").write_bytes(raw(make(root)))
    with pytest.raises(ModelError) as caught:
        import_onnx(root / "m.onnx")
    assert caught.value.code == code, str(caught.value)


def test_external_data_accepted(tmp_path: Path) -> None:
    values = np.arange(2, dtype=np.float32)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"\0" * 16 + values.tobytes())
    (tmp_path / "m.onnx").write_bytes(raw(files.at("sub/w.bin", offset="16", length="8", checksum="0" * 40)))
    graph = import_onnx(tmp_path / "m.onnx").graph
    assert [v.tolist() for v in graph.constants.values()] == [[0.0, 1.0]]


def test_links_beneath_the_root(tmp_path: Path) -> None:
    """Model hubs keep snapshots as links into a folder of blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "b1").write_bytes(np.ones(2, np.float32).tobytes())
    (tmp_path / "blobs" / "b2").write_bytes(raw(files.at("w.bin")))
    (tmp_path / "snapshot" / "w.bin").symlink_to("../blobs/b1")
    (tmp_path / "snapshot" / "m.onnx").symlink_to("../blobs/b2")
    model = tmp_path / "snapshot" / "m.onnx"
    with pytest.raises(ExternalPathError, match="--model-root"):
        import_onnx(model)
    graph = import_onnx(model, limits=Limits(model_root=str(tmp_path))).graph
    assert [v.tolist() for v in graph.constants.values()] == [[1.0, 1.0]]
    with pytest.raises(ExternalPathError, match="leaves the model root"):
        import_onnx(model, limits=Limits(model_root=str(tmp_path / "snapshot")))


def test_hard_links_can_be_allowed(tmp_path: Path) -> None:
    os.link(files.data(tmp_path / "first.bin"), tmp_path / "w.bin")
    (tmp_path / "m.onnx").write_bytes(raw(files.at("w.bin")))
    assert len(import_onnx(tmp_path / "m.onnx", limits=Limits(allow_hardlinks=True)).graph.constants) == 1


@pytest.mark.parametrize("name", files.NAMES)
def test_names_are_data(name: str) -> None:
    """The graph of a hostile name is that of a harmless one; a message shows it on one printable line."""
    hostile, plain = read_model(raw(files.named(files.NAMES[name])))[0], read_model(raw(files.named("plain")))[0]
    assert hostile.graph.nodes == plain.graph.nodes
    assert all(len(n.encode()) <= 1024 for n in (*hostile.graph.input_names, *hostile.graph.output_names))
    assert all(len(o.source) <= 300 for o in hostile.graph.origins)
    with pytest.raises(ModelError) as caught:
        read_model(raw(files.misnamed(files.NAMES[name])))
    check_message(caught.value)


def test_long_names_stay_distinct() -> None:
    a, b = (read_model(raw(files.named("n" * 5000 + tail)))[0].graph.input_names for tail in "ab")
    assert a != b


def test_model_paths(tmp_path: Path) -> None:
    fifo = tmp_path / "m.onnx"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, tmp_path / "none.onnx", Path("/dev/zero")):
        with pytest.raises(ModelError, match="W101"):
            import_onnx(path)


def test_size_limits(tmp_path: Path) -> None:
    good = raw(files.model([files.relu()]))
    (tmp_path / "m.onnx").write_bytes(good)
    with pytest.raises(LimitError, match="--max-model-bytes"):
        import_onnx(tmp_path / "m.onnx", limits=Limits(model_bytes=10))
    with pytest.raises(LimitError, match="--max-nodes"):
        import_onnx(
            raw(
                files.model(
                    [
                        helper.make_node("Relu", ["x" if k == 0 else f"v{k}"], [f"v{k + 1}" if k < 99 else "y"])
                        for k in range(100)
                    ]
                )
            ),
            limits=Limits(nodes=50),
        )
    assert import_onnx(good).operators == 1


def test_a_dying_parser_is_an_error() -> None:
    """Too little memory for the parser itself: the caller gets an error, not a crash."""
    with pytest.raises((ParserDiedError, LimitError)) as caught:
        import_onnx(raw(files.model([files.relu()])), limits=Limits(parse_memory_bytes=1 << 20))
    check_message(caught.value)


def test_processor_time_is_bounded() -> None:
    """A small file that asks for much folding ends at the limit, by name."""
    levels = files.doubling(40)
    start = time.monotonic()
    with pytest.raises(ModelError):
        import_onnx(raw(levels), limits=Limits(parse_cpu_s=2, nodes=10**9))
    assert time.monotonic() - start < 20


def test_confinement() -> None:
    """Inside the parsing process: no network, no new program, no file outside the model's directory."""
    code = """
import os, socket, subprocess, sys
from weft.frontends.onnx import confine
done = confine.confine(sys.argv[1])
def fails(f):
    try:
        f()
    except OSError:
        return True
    return False
print(",".join(done), fails(lambda: socket.socket()), fails(lambda: os.execv("/bin/true", ["true"])),
      fails(lambda: open("/etc/passwd")), fails(lambda: open(sys.argv[1] + "/new", "w")),
      not fails(lambda: open(sys.argv[1] + "/in")))
"""
    here = Path(__file__).parent
    (here / "in").touch()
    try:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        out = subprocess.run(
            [sys.executable, "-c", code, str(here)], capture_output=True, text=True, check=True, env=environment
        ).stdout.split()
    finally:
        (here / "in").unlink()
    done, network, program, outside, write, inside = out if len(out) == 6 else ("", *out)
    assert inside == "True"
    if "seccomp" in done:
        assert (network, program) == ("True", "True")
    if "landlock" in done:
        assert (outside, write) == ("True", "True")


@pytest.mark.parametrize("seed", range(6))
def test_mutants(seed: int) -> None:
    """Bytes flipped, cut and doubled at random: an import or a named refusal, never another exception."""
    rng = np.random.default_rng(seed)
    seeds = [
        raw(make())
        for name, (_, make) in files.MODELS.items()
        if name in ("cycle", "17 nested Ifs", "sparse index outside")
    ]
    seeds.append(raw(files.model([files.relu()])))
    seeds.append(raw(files.chain(5)))
    outcomes = set()
    for _ in range(120):
        data = bytearray(seeds[rng.integers(len(seeds))])
        for _ in range(int(rng.integers(1, 6))):
            at = int(rng.integers(len(data)))
            match int(rng.integers(3)):
                case 0:
                    data[at] = int(rng.integers(256))
                case 1:
                    del data[at : at + int(rng.integers(1, 9))]
                case _:
                    data[at:at] = data[at : at + 16]
            if not data:
                data = bytearray(b"\0")
        try:
            read_model(bytes(data), limits=QUICK)
            outcomes.add("imported")
        except (ModelError, UnsupportedError) as error:
            outcomes.add(error.code)
    assert len(outcomes) >= 3


def test_specialising_on_large_inputs_is_refused() -> None:
    example = [ExampleInput(DType.F32, (4,), None), ExampleInput(DType.I64, (2,), None)]
    with pytest.raises(UnsupportedError, match="W202"):
        read_model(raw(files.shape_from_input()), examples=example)
