"""`--input` and `--dim`: example inputs from files or drawn, and sizes of dimensions with and without a name."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from tests.cli.command_line import Weft, runner

import weft
from weft.cli.inputs import dims_of, given_inputs, in_order
from weft.errors import OptionError
from weft.frontends.onnx import import_onnx
from weft.frontends.onnx.errors import BindingError, NeedsValueError

F, INT = TensorProto.FLOAT, TensorProto.INT64


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Weft:
    return runner(monkeypatch, capsys)


def open_model() -> onnx.ModelProto:
    """y = reshape(x + z, s): sizes with and without names, and a shape that only a value tells."""
    x = helper.make_tensor_value_info("x", F, ["batch", None])
    z = helper.make_tensor_value_info("z", F, ["batch", "?"])
    s = helper.make_tensor_value_info("s", INT, [2])
    y = helper.make_tensor_value_info("y", F, None)
    nodes = [helper.make_node("Add", ["x", "z"], ["a"]), helper.make_node("Reshape", ["a", "s"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x, z, s], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def plain_model() -> onnx.ModelProto:
    """y = x + z, of sizes that nobody says."""
    m = open_model()
    del m.graph.node[1], m.graph.input[2]
    m.graph.node[0].output[0] = "y"
    return m


@pytest.fixture
def files(tmp_path: Path) -> Path:
    onnx.save(open_model(), tmp_path / "open.onnx")
    onnx.save(plain_model(), tmp_path / "plain.onnx")
    chance = np.random.default_rng(0)
    x = chance.standard_normal((2, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.savez_compressed(tmp_path / "all.npz", x=x, z=2 * x, s=np.array([3, 4]))
    return tmp_path


def test_inputs_by_name_decide_what_is_compiled(run: Weft, files: Path) -> None:
    names = ["--input", f"x={files / 'x.npy'}", "--input", f"s={files / 'all.npz'}", "--input", "z=random"]
    code, _, err = run("compile", files / "open.onnx", *names, "--dim", "z:1=6", "--budget", 0, "-o", files / "a.weft")
    assert code == 0, err
    assert "set to 1" not in err
    code, _, err = run(
        "run", files / "a.weft", *names[:2], "--input", f"z={files / 'all.npz'}:z", *names[2:4], "-o", files / "o.npz"
    )
    assert code == 0, err
    with np.load(files / "o.npz") as found:
        np.testing.assert_allclose(found["arr_0"], 3 * np.load(files / "x.npy").reshape(3, 4), rtol=1e-6)


def test_what_is_not_named_is_drawn_by_the_seed() -> None:
    x = torch.arange(12.0).reshape(2, 6)
    compiled = weft.compile(
        open_model().SerializeToString(), {"x": x, "s": torch.tensor([4, 3]), "z": None}, dims={"z:1": 6},
        options=weft.Options(budget_s=0),
    )  # fmt: skip
    got = compiled(x, x, torch.tensor([4, 3]))
    assert isinstance(got, torch.Tensor) and torch.equal(got, (x + x).reshape(4, 3))


def test_a_shape_needs_a_value_that_random_does_not_give(run: Weft, files: Path) -> None:
    code, _, err = run("check", files / "open.onnx", "--input", f"x={files / 'x.npy'}", "--input", "s=random")
    assert code == 4 and "--input NAME=FILE" in err and "[W202]" in err, err
    with pytest.raises(NeedsValueError):
        import_onnx(open_model().SerializeToString(), example_inputs={"x": np.zeros((2, 6), np.float32)})


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        ("nobody={x}", 3, "the model has no input 'nobody' [W114]\n  its inputs are: x, z"),
        ("nobody=random", 3, "the model has no input 'nobody' [W114]"),
        ("x={long}", 3, "input 'x': the example has rank 1, the model says 2 [W114]"),
        ("x={ints}", 3, "input 'x': the example is i64, the model says f32 [W114]"),
        ("x={pickled}", 2, "pickled.npy: a pickle can run code and is not read"),
        ("x={objects}", 2, "objects.npy: Object arrays cannot be loaded"),
        ("x={missing}", 2, "missing.npy: No such file"),
        ("x={all}:nothing", 2, "all.npz: it has no array 'nothing': x, z, s; name one as all.npz:MEMBER"),
        ("y={all}", 2, "all.npz: it has no array 'y'"),
        ("{all}", 2, "all.npz: it has several arrays: x, z, s"),
        ("={x}", 2, "is not NAME=FILE"),
        ("x={huge}", 2, "huge.npy"),
    ],
)
def test_an_input_that_cannot_be_taken_is_named(run: Weft, files: Path, given: str, code: int, told: str) -> None:
    np.save(files / "long.npy", np.zeros(3, np.float32))
    np.save(files / "ints.npy", np.zeros((2, 6), np.int64))
    np.save(files / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (files / "pickled.npy").write_bytes(b"\x80\x04\x95" + b"." * 20)
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (1 << 50,)})
    (files / "huge.npy").write_bytes(head.getvalue())
    places = {p.stem: p for p in files.glob("*.np?")} | {"missing": files / "missing.npy"}
    got, _, err = run("compile", files / "plain.onnx", "--budget", 0, "--input", given.format(**places))
    assert got == code and told in err, err


def test_a_name_twice_and_names_for_some() -> None:
    with pytest.raises(OptionError, match="'x' is given twice"):
        given_inputs(["x=random", "x=random"])
    with pytest.raises(OptionError, match=r"'b\.npy' has no NAME="):
        given_inputs(["x=random", "b.npy"])


def test_an_input_of_a_plan_that_is_left_out_is_drawn_or_told() -> None:
    x, z = torch.ones(2), torch.zeros(2)
    assert in_order({"z": x}, ["x", "z"], [z, z])[1] is x
    with pytest.raises(OptionError, match="'x' is not given"):
        in_order({"z": x}, ["x", "z"], [z, z], every=True)
    with pytest.raises(OptionError, match="no input 'w', but x, z"):
        in_order({"w": x}, ["x", "z"], [z, z])


@pytest.mark.filterwarnings("always")
def test_dimensions_that_nobody_sized_are_told_in_one_line(run: Weft, files: Path) -> None:
    _, _, err = run("compile", files / "plain.onnx", "--budget", 0)
    (line,) = [line for line in err.splitlines() if "set to 1" in line]
    assert (
        "'batch' (dimension 0 of input 'x'), unnamed (dimension 1 of input 'x'), unnamed (dimension 1 of input 'z')"
        in line
    )
    assert "--dim batch=SIZE --dim x:1=SIZE --dim z:1=SIZE" in line
    code, out, err = run("check", files / "plain.onnx", "--dim", "batch=2", "--dim", "x:1=3", "--dim", "z:1=3")
    assert code == 0 and "set to 1" not in out + err


def test_a_dimension_by_its_place() -> None:
    data = plain_model().SerializeToString()
    graph = import_onnx(data, dims={"x:0": 2, "x:1": 3, "z:1": 3}).graph  # the first one has a name, too
    assert [graph.type_of(i).shape for i in graph.inputs] == [(2, 3), (2, 3)]
    with pytest.raises(BindingError, match="symbolic size 'batch' is 2 and 4"):
        import_onnx(data, dims={"x:0": 2, "batch": 4})
    with pytest.raises(BindingError, match="no input has a symbolic dimension 'x:7'"):
        import_onnx(data, dims={"x:7": 2})
    with pytest.raises(BindingError, match="symbolic size 'x:1' is 4 and 3"):
        import_onnx(data, dims={"x:1": 4}, example_inputs=[np.zeros((2, 3), np.float32)] * 2)


def test_a_dimension_with_a_size_keeps_it() -> None:
    m = plain_model()
    m.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5
    with pytest.raises(BindingError, match="input 'x': dimension 1 has size 5, not 3"):
        import_onnx(m.SerializeToString(), dims={"x:1": 3})


def test_names_with_a_colon_or_an_equals_sign() -> None:
    m = plain_model()
    m.graph.input[0].name = m.graph.node[0].input[0] = "in=a:0"
    graph = import_onnx(m.SerializeToString(), dims=dims_of(["in=a:0:1=4", "z:1=4", "batch=2"])).graph
    assert graph.type_of(graph.inputs[0]).shape == (2, 4)
    for wrong in ("batch", "batch=", "=3", "batch=-1", "batch=x", "batch=²"):
        with pytest.raises(OptionError, match="is not NAME=SIZE"):
            dims_of([wrong])


def test_names_that_a_module_does_not_have() -> None:
    with pytest.raises(OptionError, match="do not fit forward"):
        weft.compile(torch.nn.ReLU(), {"x": torch.zeros(2)}, options=weft.Options(budget_s=0))
