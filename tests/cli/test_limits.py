"""Limits and options from flags, the environment and the options file, in this order; every limit can be reached."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import weft
from weft.cli import app as cli
from weft.cli.limits import FLAGS, HARDLINKS
from weft.errors import OptionError, UserError
from weft.frontends.onnx import Limits, import_onnx
from weft.frontends.onnx.limits import NAMES
from weft.options import Options, options_table


def write(folder: Path, text: str) -> dict[str, str]:
    """An environment whose configuration directory has this options file."""
    (folder / "weft").mkdir()
    (folder / "weft" / "weft.toml").write_text(text)
    return {"XDG_CONFIG_HOME": str(folder)}


def test_every_limit_has_a_name_and_every_flag_is_one() -> None:
    assert set(NAMES) == {f.name for f in fields(Limits)}
    assert {*FLAGS, HARDLINKS} <= set(NAMES.values())
    assert len(set(NAMES.values())) == len(NAMES)
    assert not set(NAMES.values()) & {f.name for f in fields(Options)}, "one variable cannot mean two things"


def test_the_documentation_has_every_limit_and_its_default() -> None:
    text = (Path(weft.__file__).parent.parent.parent / "docs" / "options.md").read_text()
    rows = re.findall(r"^\| (?:`(--[a-z-]+)`)? ?\| `(\w+)` \| (\S+) \|", text, re.MULTILINE)
    assert {key for _, key, _ in rows} == set(NAMES.values())
    assert {flag for flag, _, _ in rows if flag} == {f"--{n.replace('_', '-')}" for n in (*FLAGS, HARDLINKS)}
    shown = {f"WEFT_{key.upper()}": default for _, key, default in rows if default != "none"}
    assert Limits.from_environment(shown) == Limits()


def test_the_nearer_setting_wins(tmp_path: Path) -> None:
    environ = write(tmp_path, "[limits]\nmax_nodes = 3\nmax_depth = 4\nmax_calls = 5\n")
    environ |= {"WEFT_MAX_NODES": "30", "WEFT_MAX_DEPTH": "40"}
    found = Limits.from_environment(environ, {"max_nodes": "300"})
    assert (found.nodes, found.graph_depth, found.call_depth) == (300, 40, 5)
    assert found.parse_cpu_s == Limits().parse_cpu_s


def test_options_from_environment_and_file(tmp_path: Path) -> None:
    environ = write(tmp_path, 'budget_s = 20\nthreads = 3\nstrict = true\ncache_dir = "/c"\n[limits]\nmax_nodes = 1\n')
    found = Options.from_environment({**environ, "WEFT_THREADS": "5"})
    assert (found.budget_s, found.threads, found.strict, found.cache_dir) == (20.0, 5, True, Path("/c"))
    assert isinstance(found.budget_s, float)


def test_a_named_file_and_none_at_all(tmp_path: Path) -> None:
    environ = write(tmp_path, "threads = 3\n")
    (tmp_path / "other.toml").write_text("threads = 7\n")
    assert Options.from_environment({**environ, "WEFT_CONFIG": str(tmp_path / "other.toml")}).threads == 7
    assert Options.from_environment({**environ, "WEFT_CONFIG": ""}).threads == 0
    assert Options.from_environment({}).threads == 0
    home = {"HOME": str(tmp_path)}
    (tmp_path / ".config" / "weft").mkdir(parents=True)
    (tmp_path / ".config" / "weft" / "weft.toml").write_text("threads = 9\n")
    assert Options.from_environment(home).threads == 9


def test_no_file_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that came with a model must not choose where trusted binaries lie."""
    (tmp_path / "weft.toml").write_text('cache_dir = "evil"\n')
    (tmp_path / "pyproject.toml").write_text('[tool.weft]\ncache_dir = "evil"\n')
    monkeypatch.chdir(tmp_path)
    assert Options.from_environment({"HOME": "/nonexistent"}).cache_dir is None
    assert options_table({}) == {}


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("1_000", 1000), ("4KiB", 4096), ("4 KiB", 4096), ("2GiB", 2 << 30), ("1TiB", 1 << 40)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert Limits.from_environment({"WEFT_MAX_MODEL_BYTES": text}).model_bytes == size


@pytest.mark.parametrize("text", ["many", "1.5", "4GB", "GiB", "-1", "1e9", "٣", "4 GiB GiB", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError, match=r"(?i)max_nodes.*W001"):
        Limits.from_environment({"WEFT_MAX_NODES": text})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[limits]\nmax_node = 3", "max_node"),
        ("max_nodes = 3", "max_nodes"),
        ("budget = 3", "budget"),
        ("limits = 3", "limits"),
        ("[limits]\nmax_nodes = 3.5", "max_nodes"),
        ("[limits]\nmax_nodes = true", "max_nodes"),
        ("[limits]\nmax_nodes = -3", "max_nodes"),
        ("[limits]\nallow_hardlinks = 1", "allow_hardlinks"),
        ('[limits]\nmax_model_bytes = "lots"', "max_model_bytes"),
        ("threads = [1]", "threads"),
        ("cache_dir = 4", "cache_dir"),
        ("[limits\n", "WEFT_CONFIG"),
    ],
)
def test_a_file_that_cannot_be_taken_is_named(tmp_path: Path, text: str, named: str) -> None:
    environ = write(tmp_path, text)
    with pytest.raises(OptionError, match=r"W001") as error:
        (Options.from_environment(environ), Limits.from_environment(environ))
    assert named in str(error.value)
    assert named == "max_nodes" or "weft.toml" in str(error.value)


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="WEFT_CONFIG"):
        Options.from_environment({"WEFT_CONFIG": str(tmp_path / "none.toml")})
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="WEFT_CONFIG"):
        Options.from_environment({"WEFT_CONFIG": str(tmp_path / "bytes.toml")})


def test_limits_in_python_are_checked_too() -> None:
    with pytest.raises(OptionError, match="max_tensor_bytes"):
        Limits(tensor_bytes=-1)


# ---------------------------------------------------------------- the command


def chain(path: Path, length: int) -> Path:
    names = ["x", *(f"v{i}" for i in range(length))]
    nodes = [helper.make_node("Relu", [a], [b]) for a, b in pairwise(names)]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 4]) for n in (names[0], names[-1]))
    graph = helper.make_graph(nodes, "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    for name in [n for n in os.environ if n.startswith("WEFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))

    def call(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        return int(ended.value.code or 0), capsys.readouterr().err

    return call


def test_the_advice_of_an_error_helps(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(tmp_path / "m.onnx", 6)
    for command in (["check", model], ["fission", model, tmp_path / "o.onnx"], ["compile", model, "--budget", "0"]):
        code, text = run(*command, "--max-nodes", "5")
        assert code == 3 and "[W105]" in text, text
        assert "more than 5 nodes" in text
        for way in ("--max-nodes", "WEFT_MAX_NODES", "`max_nodes` in [limits]"):
            assert way in text
    monkeypatch.setenv("WEFT_MAX_NODES", "5")
    assert run("check", model)[0] == 3
    assert run("check", model, "--max-nodes", "6")[0] == 0


def test_other_limits_by_flag(run: Any, tmp_path: Path) -> None:
    model = chain(tmp_path / "m.onnx", 3)
    code, text = run("check", model, "--max-model-bytes", "10")
    assert code == 3 and "[W105]" in text and "--max-model-bytes" in text
    code, text = run("check", model, "--max-tensor-bytes", "31")
    assert code == 3 and "[W105]" in text and "the limit is 31" in text and "--max-tensor-bytes" in text
    code, text = run("check", model, "--max-nodes", "few")
    assert code == 2 and "[W001]" in text and "option '--max-nodes'" in text


def test_external_data_by_flag(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    weights = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 4]) for n in "xy")
    graph = helper.make_graph([node], "g", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert run("check", folder / "m.onnx")[0] == 0
    code, text = run("check", folder / "m.onnx", "--max-external-bytes", "10")
    assert code == 3 and "[W112]" in text and "--max-external-bytes" in text
    os.link(folder / "w.bin", folder / "second")
    code, text = run("check", folder / "m.onnx")
    assert code == 3 and "[W113]" in text and "--allow-hardlinks" in text
    assert run("check", folder / "m.onnx", "--allow-hardlinks")[0] == 0
    (tmp_path / "blobs").mkdir()
    (folder / "second").unlink()
    (folder / "w.bin").rename(tmp_path / "blobs" / "w")
    (folder / "w.bin").symlink_to(tmp_path / "blobs" / "w")
    code, text = run("check", folder / "m.onnx")
    assert code == 3 and "[W113]" in text and "--model-root" in text
    assert run("check", folder / "m.onnx", "--model-root", tmp_path)[0] == 0
    assert run("check", folder / "m.onnx", "--model-root", folder)[0] == 3


def nested(depth: int) -> bytes:
    """`depth` functions, each calling the next."""
    opset = helper.make_opsetid("", 17), helper.make_opsetid("f", 1)
    functions = [
        helper.make_function(
            "f", f"f{i}", ["x"], ["y"],
            [helper.make_node(*((f"f{i + 1}", ["x"], ["y"]) if i + 1 < depth else ("Relu", ["x"], ["y"])),
                              domain="f" if i + 1 < depth else "")],
            list(opset),
        )
        for i in range(depth)
    ]  # fmt: skip
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("f0", ["x"], ["y"], domain="f")], "g", [x], [y])
    return helper.make_model(graph, opset_imports=opset, functions=functions, ir_version=9).SerializeToString()


def test_calls_and_time() -> None:
    assert import_onnx(nested(5)).operators >= 1
    with pytest.raises(UserError, match=r"W109(.|\n)*--max-calls"):
        import_onnx(nested(5), limits=Limits(call_depth=4))
    with pytest.raises(UserError, match=r"W110(.|\n)*--parse-timeout or --max-parse-memory"):
        import_onnx(nested(2), limits=Limits(parse_memory_bytes=0))
