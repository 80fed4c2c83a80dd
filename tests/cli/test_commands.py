"""Every command of `weft` on tiny models: what it prints, what it writes, and its exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import weft
from weft.cli import app as cli
from weft.cli import main
from weft.device import facts
from weft.device.files import private_directory
from weft.errors import DeviceError, InvalidGraphError, OptionError, ToolchainError

HOSTILE = "[bold]\x1b[31mred\x1b]0;title\x07\u202egnp"


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Its standard output as JSON, without the numbers that JSON lacks."""
        return json.loads(self.out, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


Weft = Callable[..., Done]


def make_model(path: Path, *, op: str = "Relu", domain: str = "", name: str = "net", size: int = 4) -> Path:
    """y = softmax(op(x · w) + b) on 2 x `size`."""
    chance = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(chance.normal(size=(size, 6)).astype(np.float32), "w"),
        numpy_helper.from_array(chance.normal(size=6).astype(np.float32), "b"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name=f"{name}/matmul"),
        helper.make_node(op, ["m"], ["r"], name=f"{name}/act", domain=domain),
        helper.make_node("Add", ["r", "b"], ["a"], name=f"{name}/add"),
        helper.make_node("Softmax", ["a"], ["y"], name=f"{name}/softmax", axis=-1),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, size])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 6])
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return private_directory(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def run(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Weft:
    """The entry point of the console script, in this process."""
    for name in [n for n in os.environ if n.startswith("WEFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(cache))
    monkeypatch.setenv("COLUMNS", "400")

    def call(*args: object) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        found = capsys.readouterr()
        code = ended.value.code
        assert "Traceback" not in found.err and "Traceback" not in found.out
        return Done(code if isinstance(code, int) else 0, found.out, found.err)

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "net.onnx")


def test_a_limit_on_memory_is_an_option_of_compile(run: Weft, model: Path) -> None:
    done = run("compile", model, "--budget", "0", "--memory-limit", "1MiB", "--format", "json")
    assert done.code == 0 and done.data
    for given, told in (
        ("8", "8 bytes at once"),
        ("much", "'much' is not a whole number, or a size"),
        ("-1", "no number of bytes"),
    ):
        done = run("compile", model, "--budget", "0", f"--memory-limit={given}")
        assert done.code == 2 and told in done.err and "[W001]" in done.err, done.err


def test_a_place_that_cannot_be_written_is_told_before_tuning(run: Weft, model: Path, tmp_path: Path) -> None:
    for flag in ("-o", "--report"):
        done = run("compile", model, "--budget", "60", flag, tmp_path / "no" / "net")
        assert done.code == 3 and "net: the folder" in done.err and "does not exist [W401]" in done.err, done.err
        assert "enumerate" not in done.err
        done = run("compile", model, "--budget", "60", flag, tmp_path)
        assert done.code == 3 and "it is a folder [W401]" in done.err and "enumerate" not in done.err, done.err


def test_a_refused_file_is_named(run: Weft, model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(model.read_bytes()[:40])
    done = run("check", cut)
    assert done.code == 3 and done.err.startswith("weft: cut.onnx: "), done.err


def test_an_unknown_dimension_is_refused(run: Weft, model: Path) -> None:
    done = run("check", model, "--dim", "batch=3")
    assert done.code == 3 and "no input has a symbolic dimension 'batch' [W114]" in done.err, done.err


def test_products_that_do_not_fit_say_why(run: Weft, tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 5])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"], name="mm")], "g", [x], [y])
    path = tmp_path / "mm.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    done = run("check", path)
    assert done.code == 3 and "node 0 'mm' (MatMul): Incompatible dimensions" in done.err, done.err


def test_shapes_that_depend_on_values_are_told_once(run: Weft, tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 5])
    y = helper.make_tensor_value_info("y", TensorProto.INT64, [2, "n"])
    graph = helper.make_graph([helper.make_node("NonZero", ["x"], ["y"], name="nz")], "g", [x], [y])
    path = tmp_path / "nz.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    done = run("check", path)
    assert done.code == 0 and done.out.count("depends on run-time values") == 1, done.out
    refused = run("compile", path, "--budget", "0", "-o", tmp_path / "nz.weft")
    assert refused.code == 4 and refused.err.count("depends on run-time values") == 1, refused.err
    assert "export the model without this operator" in refused.err and "`weft check`" not in refused.err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model: Path, cache: Path) -> Path:
    """A plan that a real process compiled, with its record and its report beside it."""
    plan = tmp_path_factory.mktemp("plan") / "net.weft"
    source = Path(weft.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "weft", "compile", str(model), "-o", str(plan), "--report", str(plan) + ".html",
         "--budget", "300", "--format", "json"],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "WEFT_CACHE_DIR": str(cache), "PYTHONPATH": str(source)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    Path(str(plan) + ".stdout").write_text(done.stdout)
    return plan


def reference(model: Path, x: np.ndarray) -> np.ndarray:
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(model).graph.initializer}
    a = np.maximum(x @ weights["w"], 0) + weights["b"]
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---------------------------------------------------------------- compile, run


def test_compile_in_a_process_writes_plan_record_and_report(saved: Path) -> None:
    printed = json.loads(Path(str(saved) + ".stdout").read_text())
    record = json.loads(Path(str(saved) + ".record.json").read_text())
    assert printed == record, "the record on standard output is the one beside the plan"
    assert record["operators"] == 4 and record["steps"] and record["model"] == "net"
    assert any(p["name"] == record["chosen"] and p["verified"] for p in record["plans"])
    page = Path(str(saved) + ".html").read_text()
    assert page.startswith("<!doctype html>") and "default-src 'none'" in page


def test_compile_prints_a_summary(run: Weft, model: Path, tmp_path: Path) -> None:
    done = run("compile", model, "--budget", "0", "-o", tmp_path / "p.weft")
    assert done.code == 0
    assert re.search(r"^operators\s+4$", done.out, re.MULTILINE)
    assert re.search(r"^\S.* \* .* yes ", done.out, re.MULTILINE)  # a name may end in "1 thread"
    assert "digest" in done.err and (tmp_path / "p.weft").is_file()


def test_run_reads_npy_and_writes_npz(run: Weft, saved: Path, model: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    done = run("run", saved, "--input", tmp_path / "x.npy", "-o", tmp_path / "out", "--format", "json")
    assert done.code == 0, done.err
    [row] = done.data
    expected = reference(model, x)
    assert row["shape"] == [2, 6] and row["mean"] == pytest.approx(expected.mean(), abs=1e-6)
    with np.load(tmp_path / "out") as found:
        np.testing.assert_allclose(found["arr_0"], expected, atol=1e-6)
    text = run("run", saved, "--input", tmp_path / "x.npy")
    assert text.code == 0 and "(2, 6)" in text.out.replace("[", "(").replace("]", ")")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"not an array at all"])
def test_run_refuses_what_is_no_array(run: Weft, saved: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    done = run("run", saved, "--input", tmp_path / "x.npy")
    assert done.code == 2 and "[W001]" in done.err and "x.npy" in done.err


def test_run_does_not_read_a_device_to_its_end(run: Weft, saved: Path) -> None:
    done = run("run", saved, "--input", "/dev/zero")
    assert done.code == 2 and "[W001]" in done.err and "magic" in done.err


def test_run_refuses_pickles_texts_and_wrong_shapes(run: Weft, saved: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "text.npy", np.array(["a"]))
    np.save(tmp_path / "shape.npy", np.zeros((3, 4), np.float32))
    for name in ("object.npy", "text.npy", "missing.npy"):
        done = run("run", saved, "--input", tmp_path / name)
        assert done.code == 2 and "[W001]" in done.err, name
    for inputs in ([], ["--input", tmp_path / "shape.npy"]):
        done = run("run", saved, *inputs)
        assert done.code == 2 and "[W011]" in done.err


def test_outputs_that_cannot_be_written(run: Weft, saved: Path, model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 4), np.float32))
    nowhere = tmp_path / "no" / "such" / "place"
    for args in (
        ("run", saved, "--input", tmp_path / "x.npy", "-o", nowhere),
        ("report", saved, "-o", nowhere),
        ("fission", model, nowhere),
        ("compile", model, "--budget", "0", "-o", nowhere),
        ("compile", model, "--budget", "0", "--report", nowhere),
    ):
        done = run(*args)
        assert done.code == 3 and "[W401]" in done.err, args


def test_a_damaged_plan(run: Weft, saved: Path, tmp_path: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "bad.weft").write_bytes(data)
    ended = [run("run", tmp_path / name) for name in ("bad.weft", "missing.weft")]
    assert all(done.code == 3 and "[W401]" in done.err for done in ended)
    assert "missing.weft: does not exist" in ended[-1].err


def test_a_model_is_no_plan(run: Weft, model: Path) -> None:
    done = run("trace", model, "-o", model.parent / "trace.json")
    assert done.code == 3 and "is no readable plan" in done.err and "weft compile model.onnx" in done.err


# ---------------------------------------------------------------- bench, fission, check


def test_bench_against_the_library(run: Weft, model: Path) -> None:
    done = run("bench", model, "--against", "library", "--budget", "0", "--rounds", "3", "--format", "json")
    assert done.code == 0, done.err
    assert set(done.data["median_us"]) == {"weft", "library"}
    assert all(len(s) == 3 and min(s) > 0 for s in done.data["samples_us"].values())
    text = run("bench", model, "--against", "library", "--budget", "0", "--rounds", "3")
    assert re.search(r"^weft .*1\.00$", text.out, re.MULTILINE)


def test_bench_against_onnxruntime(run: Weft, model: Path) -> None:
    pytest.importorskip("onnxruntime")
    done = run("bench", model, "--budget", "0", "--rounds", "3", "--format", "json")
    assert done.code == 0 and done.data["median_us"]["onnxruntime"] > 0


def test_onnxruntime_is_given_bytes_that_lie_where_the_model_may_read(run: Weft, model: Path, tmp_path: Path) -> None:
    """As a peer, too: data beside the model work, and it opens nothing by itself."""
    import torch

    from weft.cli.peers import onnxruntime_peer
    from weft.frontends.onnx import Limits

    onnxruntime = pytest.importorskip("onnxruntime")
    (tmp_path / "m").mkdir()
    beside, outside = tmp_path / "m" / "beside.onnx", tmp_path / "m" / "outside.onnx"
    proto = onnx.load(model)
    onnx.save_model(proto, beside, save_as_external_data=True, location="w.bin", size_threshold=0)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    given: list[object] = []
    make = onnxruntime.InferenceSession

    def session(source: object, *more: Any, **named: Any) -> Any:
        given.append(source)
        return make(source, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", session)
        peer = onnxruntime_peer(beside, [x], 1, Limits())
    assert peer.run is not None and given and all(isinstance(source, bytes) for source in given)
    np.testing.assert_allclose(peer.run()[0].numpy(), reference(model, x.numpy()), atol=1e-6)
    (tmp_path / "w.bin").write_bytes((tmp_path / "m" / "w.bin").read_bytes())
    elsewhere = onnx.load(beside, load_external_data=False)
    for t in elsewhere.graph.initializer:
        for entry in t.external_data:
            entry.value = "../w.bin" if entry.key == "location" else entry.value
    onnx.save(elsewhere, outside)
    with pytest.raises(OptionError, match="W113"):
        onnxruntime_peer(outside, [x], 1, Limits())


def test_bench_against_torch(run: Weft, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    compiled = []

    def noted(module: object, *, mode: str | None = None, **_: object) -> object:
        compiled.append(mode)
        return module

    monkeypatch.setattr(torch, "compile", noted)
    peers = "eager,inductor,max-autotune"
    done = run("bench", model, "--against", peers, "--budget", "0", "--rounds", "3", "--format", "json")
    assert done.code == 0, done.err
    assert list(done.data["median_us"]) == ["eager", "inductor", "max-autotune", "weft"]
    assert done.data["notes"]["eager"] == "4 operators, one ATen call each"
    assert compiled == [None, "max-autotune-no-cudagraphs"]
    text = run("bench", model, "--against", "eager", "--budget", "0", "--rounds", "3")
    assert re.search(r"^eager: 4 operators, one ATen call each$", text.out, re.MULTILINE)


def test_bench_names_the_peer_that_cannot(run: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken(module: object, **_: object) -> object:
        def fail(*_: object) -> None:
            raise RuntimeError("no compiler\x1b[31m\nat all")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    model = make_model(tmp_path / "m.onnx")
    done = run("bench", model, "--against", "inductor", "--budget", "0", "--rounds", "3")
    assert done.code == 0 and "\x1b" not in done.out
    assert re.search(r"^inductor +- +-$", done.out, re.MULTILINE)
    assert re.search(r"^inductor: fails: RuntimeError: no compiler", done.out, re.MULTILINE)


def test_bench_refuses_before_it_compiles(run: Weft, model: Path) -> None:
    for args in (["--against", "magic"], ["--rounds", "0"]):
        done = run("bench", model, "--budget", "600", *args)
        assert done.code == 2 and "measure" not in done.err


def test_fission_writes_an_equal_model(run: Weft, model: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    done = run("fission", model, tmp_path / "p.onnx", "--format", "json")
    assert done.code == 0, done.err
    assert done.data["operators"] == 4 and done.data["opaque"] == 0
    kinds = {n.op_type for n in onnx.load(tmp_path / "p.onnx").graph.node}
    assert "Softmax" not in kinds and "Exp" in kinds
    x = np.random.default_rng(2).normal(size=(2, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(tmp_path / "p.onnx"), providers=["CPUExecutionProvider"])
    [found] = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(found, reference(model, x), atol=1e-6)


def test_fission_with_weights_beside_the_model(run: Weft, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = make_model(tmp_path / "m.onnx", size=100)
    done = run("fission", model, tmp_path / "p.onnx", "--external", "--format", "json")
    assert done.code == 0, done.err
    assert done.data["files"] == ["p.onnx", "p.onnx.data"]
    assert (tmp_path / "p.onnx.data").stat().st_size >= 100 * 6 * 4 > (tmp_path / "p.onnx").stat().st_size - 2000
    x = np.random.default_rng(2).normal(size=(2, 100)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(tmp_path / "p.onnx"), providers=["CPUExecutionProvider"])
    [found] = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(found, reference(model, x), atol=1e-6)
    assert run("fission", model, tmp_path / "no" / "p.onnx", "--external").code == 3


def test_check(run: Weft, model: Path) -> None:
    done = run("check", model, "--format", "json")
    assert done.code == 0 and done.data["operators"] == 4 and done.data["opaque"] == []
    assert "every operator is compiled" in run("check", model).out


@pytest.mark.filterwarnings("default:Weft compiles")
def test_a_file_of_two_partitions(run: Weft, tmp_path: Path) -> None:
    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("NonZero", ["e"], ["y"])]
    values = [helper.make_tensor_value_info(n, t, s) for n, t, s in (("x", 1, [2, 3]), ("y", 7, None))]
    made = helper.make_model(
        helper.make_graph(nodes, "g", values[:1], values[1:]), opset_imports=[helper.make_opsetid("", 18)]
    )
    path = tmp_path / "two.onnx"
    path.write_bytes(made.SerializeToString())
    told = run("check", path, "--format", "json").data
    assert told["operators"] == 1 and told["rest"]["operators"] == {"NonZero": 1}
    assert "depends on run-time values" in told["rest"]["reason"]
    text = run("check", path).out
    assert "ONNX Runtime runs the rest" in text and "every operator is compiled" not in text
    done = run("compile", path, "--budget", "0", "--format", "json")
    assert done.code == 0 and "ONNX Runtime runs the rest (1 NonZero)" in done.err
    for place in (("-o", tmp_path / "two.weft"), ("--report", tmp_path / "two.html")):
        refused = run("compile", path, "--budget", "0", *place)
        assert refused.code == 4 and "NonZero" in refused.err and not place[1].exists()


def test_check_says_what_compile_does_of_a_condition_that_follows_from_data(run: Weft, tmp_path: Path) -> None:
    nodes = [helper.make_node("Greater", ["x", "zero"], ["c"]), helper.make_node("Compress", ["x", "c"], ["y"])]
    values = [helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [20]), ("y", None))]
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [zero])
    path, x = tmp_path / "data.onnx", tmp_path / "x.npy"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    np.save(x, np.linspace(-1, 1, 20, dtype=np.float32))
    told = run("check", path, "--input", f"x={x}", "--format", "json").data
    assert told["rest"]["operators"] == {"Compress": 1} and "others in each call" in told["rest"]["reason"]
    assert run("check", path).code == 4  # no value is given


# ---------------------------------------------------------------- explain, report


def test_explain_by_number_node_and_operator(run: Weft, saved: Path) -> None:
    everything = run("explain", saved, "--format", "json").data
    first = everything[0]
    assert run("explain", saved, "0", "--format", "json").data == [first]
    by_node = run("explain", saved, f"%{first['nodes'][0]}", "--format", "json").data
    assert first in by_node
    by_name = run("explain", saved, "softmax", "--format", "json").data
    assert by_name and all(any("softmax" in o for o in s["operators"]) for s in by_name)
    text = run("explain", saved, "0").out
    assert "kernel 0" in text and "primitives" in text and "tried" in text
    files = {f for s in everything for f in s["written_in"]}
    assert files and all((Path(weft.__file__).parent.parent / f).is_file() for f in files)
    assert f"written in  {', '.join(first['written_in']) or '-'}" in text
    beside = run("explain", str(saved) + ".record.json", "0", "--format", "json")
    assert beside.data == [first]


FUSED_LOOPS, FRAME = "weft/generate/cpp/kernel.py", "weft/generate/cpp/frame.py"


def test_explain_shows_a_text_and_where_its_lines_are_written(run: Weft, saved: Path) -> None:
    kernels = [s for s in run("explain", saved, "--format", "json").data if s["written_in"] == [FUSED_LOOPS]]
    number = str(kernels[0]["position"])
    text = run("explain", saved, number, "--text").out
    assert f"// kernel {number}: written in {kernels[0]['written_in'][0]}" in text
    assert "// weft/generate/cpp/weft_simd.h" in text and "_mm512" not in text
    (shown,) = run("explain", saved, number, "--text", "--format", "json").data
    assert shown["text"] in text and shown["kernel"] == kernels[0]["position"]
    line = next(x for x in shown["text"].splitlines() if 'extern "C" void' in x)
    (found,) = run("explain", saved, number, "--line", line, "--format", "json").data
    assert found["origins"][0]["file"] == FRAME
    told = run("explain", saved, number, "--line", line).out
    assert f"{FRAME}:{found['origins'][0]['line']}" in told
    assert "no text of Weft is like this line" in run("explain", saved, number, "--line", "launch_the_missiles()").out


def test_explain_what_is_not_there(run: Weft, saved: Path) -> None:
    for node in ("99", "%99999", "nonesuch"):
        done = run("explain", saved, node)
        assert done.code == 2 and "no kernel of this plan matches" in done.err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 3}', "[" * 100_000, "\x00"])
def test_a_record_that_is_none(run: Weft, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.record.json").write_text(text)
    for command in ("explain", "report"):
        done = run(command, tmp_path / "a.record.json")
        assert done.code == 3 and "[W401]" in done.err


def test_report(run: Weft, saved: Path, tmp_path: Path) -> None:
    done = run("report", saved, "-o", tmp_path / "r.html", "--format", "json")
    assert done.code == 0 and done.data == {"report": str(tmp_path / "r.html")}
    assert (tmp_path / "r.html").read_text() == Path(str(saved) + ".html").read_text()
    done = run("report", saved, "-o", tmp_path / "two.html", "--beside", saved)
    assert done.code == 0 and 'id="beside"' in (tmp_path / "two.html").read_text()
    done = run("report", saved, "-o", tmp_path / "three.html", "--beside", tmp_path / "none.weft")
    assert (
        done.code == 3 and "[W401]" in done.err and "none.weft" in done.err and not (tmp_path / "three.html").exists()
    )


# ---------------------------------------------------------------- doctor, db


def test_doctor(run: Weft, cache: Path) -> None:
    data = run("doctor", "--format", "json").data
    assert data["weft"] == weft.__version__ and data["cache"] == str(cache) and int(data["cores"]) >= 1
    assert "GFLOP/s" in run("doctor").out


def test_db(run: Weft, saved: Path, cache: Path) -> None:
    stats = run("db", "stats", "--format", "json").data
    assert stats["rows"] >= 1 and stats["problems"] >= 1 and Path(stats["path"]) == cache
    assert sum(stats["verdicts"].values()) == stats["rows"]
    assert run("db", "verify", "--format", "json").data == {"good": stats["rows"], "bad": 0}
    assert run("db", "prune", "--format", "json").data == {"removed": 0}
    assert re.search(r"^rows +[1-9]", run("db").out, re.MULTILINE)
    assert re.search(r"^good +[1-9]", run("db", "verify").out, re.MULTILINE)
    assert re.search(r"^removed +0", run("db", "prune").out, re.MULTILINE)


@pytest.mark.filterwarnings("always:Weft goes on without its cache")
def test_a_cache_that_cannot_be_used(
    run: Weft, model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = facts.cpu_facts(cache)
    monkeypatch.setattr(facts, "cpu_facts", lambda _: known)  # probing the machine takes seconds
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "file"))
    done = run("doctor")
    assert "NOT writable" in done.out and done.err.count("weft: warning: Weft goes on without its cache") == 1
    stats = run("db", "--format", "json")
    assert stats.code == 0 and stats.data["backend"] == "memory" and stats.data["rows"] == 0

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "compile_model", fail)
    done = run("compile", model)
    assert done.code == 70 and "no log could be written" in done.err


# ---------------------------------------------------------------- exit codes, hostile names


def test_usage_is_2(run: Weft, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for args in (
        ("nonsense",), ("compile",), ("check", model, "--format", "xml"), ("db", "burn"),
        ("compile", model, "--dim", "batch"), ("compile", model, "--dim", "batch=-1"),
        ("compile", model, "--device", "tpu"),
        ("compile", model, "--budget", "-1"), ("compile", model, "--budget", "nan"),
        ("compile", model, "--budget", "soon"),
    ):  # fmt: skip
        assert run(*args).code == 2, args
    monkeypatch.setenv("WEFT_THREADS", "many")
    done = run("compile", model, "--budget", "0")
    assert done.code == 2 and "WEFT_THREADS" in done.err


def test_a_refused_model_is_3(run: Weft, tmp_path: Path) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"\x08\x07garbage" * 20)
    for command in ("check", "compile"):
        for path in (bad, tmp_path / "missing.onnx", tmp_path):
            done = run(command, path)
            assert done.code == 3 and re.search(r"\[W1\d\d\]", done.err), (command, path)
            assert len(done.err.splitlines()) <= 15


def test_an_unknown_operator_names_itself(run: Weft, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.onnx", op="Frobnicate", domain="org.example")
    done = run("check", model)
    assert done.code == 3 and "Frobnicate" in done.err and "[W103]" in done.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeviceError(problem="no worker"), 5),
        (ToolchainError(tool="cc", status=1, log="a long log"), 5),
        (InvalidGraphError(problem="a cycle"), 70),
        (ZeroDivisionError("\x1b[31mdivision"), 70),
        (KeyboardInterrupt(), 130),
    ],
)
def test_other_ends(
    run: Weft, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "compile_model", fail)
    done = run("compile", model)
    assert done.code == code and done.err.startswith("weft: ") and "\x1b" not in done.err
    if code == 130:
        assert "interrupted" in done.err
    elif code == 70 or isinstance(error, ToolchainError):
        log = Path(done.err.split("full log: ")[1].strip())
        assert log.is_relative_to(cache) and type(error).__name__ in log.read_text()
    else:
        assert "log" not in done.err


def test_unsupported_is_4(run: Weft, tmp_path: Path) -> None:
    """A sequence as an output of the model: well-formed, but no tensor."""
    parts = helper.make_node("SplitToSequence", ["x"], ["s"], axis=0)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])
    s = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    graph = helper.make_graph([parts], "g", [x], [s])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    done = run("check", tmp_path / "m.onnx")
    assert done.code == 4 and re.search(r"\[W20\d\]", done.err), done.err


def test_hostile_names_do_not_reach_the_terminal(run: Weft, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.onnx", name=HOSTILE, size=5)
    plan = tmp_path / "p.weft"
    texts = []
    for args in (
        ("check", model), ("compile", model, "--budget", "0", "-o", plan), ("explain", plan),
        ("explain", plan, HOSTILE + "x"), ("report", plan, "-o", tmp_path / "r.html"),
    ):  # fmt: skip
        done = run(*args)
        texts.append(done.out + done.err)
    broken = make_model(tmp_path / "b.onnx", op="Frobnicate", domain="org.example", name=HOSTILE)
    texts.append(run("check", broken).err)
    texts.append((tmp_path / "r.html").read_text())
    for text in texts:
        assert not re.search("[\x1b\x07\u202e]", text)
    assert "red" in texts[2] and "[bold]" in texts[2], "the name is shown, its escapes are not"


def test_json_with_hostile_names_parses(run: Weft, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.onnx", name=HOSTILE, size=5)
    done = run("compile", model, "--budget", "0", "--format", "json")
    assert done.code == 0 and "\x1b" not in done.out
    assert any("red" in o for s in done.data["steps"] for o in s["operators"])


def test_help_has_every_command(run: Weft) -> None:
    done = run("--help")
    assert done.code == 0
    for name in ("compile", "run", "bench", "fission", "check", "explain", "report", "doctor", "db"):
        assert re.search(rf"^\s+{name}\s", done.out, re.MULTILINE), name
        assert run(name, "--help").code == 0


def test_trace_writes_when_each_kernel_ran(run: Weft, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    told = run("trace", saved, "-o", out, "--format", "json").data
    found = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]
    assert told["source"] == "clock" and told["spans"] == len([e for e in found if e["cat"] == "kernel"]) > 0
    given = tmp_path / "x.npy"
    np.save(given, np.zeros((2, 4), np.float32))
    done = run("trace", saved, "--input", given, "-o", out)
    assert done.code == 0 and str(out) in done.out
    done = run("trace", saved, "-o", tmp_path / "no" / "trace.json")
    assert done.code == 3 and "cannot be written" in done.err
    np.save(given, np.zeros((2, 5), np.float32))
    done = run("trace", saved, "--input", given, "-o", out)
    assert done.code != 0 and "[W011]" in done.err


def test_an_interrupt_while_the_command_is_loaded_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "weft.cli.app", Interrupted())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "weft: interrupted\n"
