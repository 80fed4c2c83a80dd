"""What ONNX Runtime alone can run: operators of its own domains, and values of types that Weft lacks."""

from __future__ import annotations

import base64
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.typed import narrow, noting

import weft
from weft.errors import LimitError, ModelError, RefusedError, UnsupportedError
from weft.frontends.onnx import import_onnx, opaque, pieces
from weft.frontends.onnx.errors import NoRuleError, NoRuntimeError, ParserDiedError, UnsupportedTypeError
from weft.frontends.onnx.pieces import Absent, Runtime
from weft.frontends.onnx.read import read_model
from weft.frontends.onnx.trial import session_of
from weft.generate.library.opaque_onnx import run_onnx
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType

pytest.importorskip("onnxruntime")
F, INT = TensorProto.FLOAT, TensorProto.INT64
IMPORTS = [
    helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("ai.onnx.ml", 3),
]  # fmt: skip


def info(name: str, shape: Sequence[Any], kind: Any = F) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(
    nodes: Sequence[onnx.NodeProto], inputs: Any, outputs: Any, initialisers: Any = (), imports: Any = IMPORTS
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initialisers))
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def raw(*args: Any, **kwargs: Any) -> bytes:
    return model(*args, **kwargs).SerializeToString()


def weights(**arrays: Any) -> Any:
    return [numpy_helper.from_array(np.asarray(x), n) for n, x in arrays.items()]


def theirs(data: Any, *arrays: Any) -> Any:
    """What ONNX Runtime makes of the whole model."""
    session = session_of(data, 1)
    return session.run(None, {i.name: x for i, x in zip(session.get_inputs(), arrays, strict=True)})


def ours(imported: Any, *arrays: Any) -> Any:
    return evaluate(imported.graph, list(arrays), opaque=lambda attrs, xs: run_onnx(attrs.payload, xs))


def prims(imported: Any) -> Any:
    return [n.prim for n in imported.graph.nodes]


def payloads(imported: Any) -> Any:
    found = [json.loads(n.attrs.payload)["model"] for n in imported.graph.nodes if n.prim is Prim.OPAQUE]
    return [onnx.load_model_from_string(base64.b64decode(x)) for x in found]


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


NORMED = [
    helper.make_node("MatMul", ["x", "w"], ["a"]),
    helper.make_node("BiasGelu", ["a", "b"], ["g"], domain="com.microsoft", name="gelu"),
    helper.make_node("SkipLayerNormalization", ["g", "x", "s"], ["y"], domain="com.microsoft"),
]
NORMED_MODEL = raw(
    NORMED, [info("x", [2, 3, 8])], [info("y", [2, 3, 8])],
    weights(w=drawn(8, 8, seed=1), b=drawn(8, seed=2), s=np.ones(8, np.float32)),
)  # fmt: skip


def test_operators_of_com_microsoft() -> None:
    """As an optimiser of exported models writes them; only they go to the runtime."""
    imported = import_onnx(NORMED_MODEL)
    assert [u.op for u in imported.opaque] == [
        "onnx::com.microsoft.BiasGelu", "onnx::com.microsoft.SkipLayerNormalization"
    ]  # fmt: skip
    assert Prim.MATMUL in prims(imported)
    x = drawn(2, 3, 8, seed=3)
    np.testing.assert_allclose(ours(imported, x)[0], theirs(NORMED_MODEL, x)[0], rtol=1e-5, atol=1e-6)


def test_a_model_of_them_compiles_and_runs() -> None:
    compiled = weft.compile(NORMED_MODEL, options=weft.Options(budget_s=0))
    x = drawn(2, 3, 8, seed=4)
    found = narrow(torch.Tensor, compiled(torch.from_numpy(x)))
    np.testing.assert_allclose(found.numpy(), theirs(NORMED_MODEL, x)[0], rtol=1e-5, atol=1e-6)


def test_operators_of_ai_onnx_ml_without_a_rule() -> None:
    scaler = helper.make_node(
        "Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[1.0, 2.0, 3.0], scale=[2.0, 3.0, 4.0]
    )
    encoder = helper.make_node(
        "LabelEncoder", ["i"], ["e"], domain="ai.onnx.ml", keys_int64s=[0, 1, 2], values_floats=[0.5, 1.5, 2.5]
    )
    data = raw([scaler, encoder], [info("x", [4, 3]), info("i", [4], INT)], [info("y", [4, 3]), info("e", [4])])
    x, i = drawn(4, 3), np.array([2, 0, 1, 2])
    for a, b in zip(ours(import_onnx(data), x, i), theirs(data, x, i), strict=True):
        np.testing.assert_array_equal(a, b)


def unsigned(kind: Any, op: str = "Add") -> Any:
    """Casts to a type that Weft lacks, arithmetic there, and back."""
    return [
        helper.make_node("Cast", ["x"], ["u"], to=kind),
        helper.make_node(op, ["u", "w"], ["s"]),
        helper.make_node("Cast", ["s"], ["y"], to=F),
    ]


KINDS = {"uint32": TensorProto.UINT32, "uint64": TensorProto.UINT64}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", ["in the model", "beside it"])
def test_only_types_of_weft_cross_the_border(kind: str, data: str, tmp_path: Path) -> None:
    m = model(unsigned(KINDS[kind]), [info("x", [4])], [info("y", [4])], weights(w=np.array([1, 2, 3, 4], kind)))
    reference = m.SerializeToString()
    if data == "beside it":
        onnx.save_model(m, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
        imported = import_onnx(tmp_path / "m.onnx")
        (tmp_path / "w.bin").unlink()
    else:
        imported = import_onnx(reference)
    assert prims(imported) == [Prim.INPUT, Prim.OPAQUE]
    (piece,) = payloads(imported)
    assert [n.op_type for n in piece.graph.node] == ["Cast", "Add", "Cast"]
    x = np.array([0, 1, 200, 70000], np.float32)
    assert ours(imported, x)[0].tolist() == theirs(reference, x)[0].tolist() == [1, 3, 203, 70004]


def test_a_value_of_another_type_with_two_readers_is_made_in_both() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["u"], to=TensorProto.UINT16),
        helper.make_node("Cast", ["u"], ["y"], to=F),
        helper.make_node("Identity", ["u"], ["v"]),
        helper.make_node("Cast", ["v"], ["z"], to=TensorProto.INT32),
    ]
    data = raw(nodes, [info("x", [3])], [info("y", [3]), info("z", [3], TensorProto.INT32)])
    imported = import_onnx(data)
    assert [len(p.graph.node) for p in payloads(imported)] == [2, 3]
    x = np.array([1, 2, 65535], np.float32)
    for a, b in zip(ours(imported, x), theirs(data, x), strict=True):
        assert a.tolist() == b.tolist() == [1, 2, 65535]


def test_what_reads_no_input_becomes_a_constant() -> None:
    """Weights of 16 or 4 bits that are dequantised in front of a product: the product is Weft's."""
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    q = np.arange(12, dtype=np.uint16).reshape(4, 3) * 5000
    data = raw(
        nodes, [info("x", [2, 4])], [info("y", [2, 3])],
        weights(q=q, scale=np.float32(0.5), zero=np.uint16(7)), imports=[helper.make_opsetid("", 21)],
    )  # fmt: skip
    imported = import_onnx(data)
    assert Prim.OPAQUE not in prims(imported)
    assert imported.opaque == ()
    (w,) = (imported.graph.constant(i) for i, n in enumerate(imported.graph.nodes) if n.prim is Prim.CONSTANT)
    assert w.tolist() == ((q.astype(np.float32) - 7) * 0.5).tolist()
    compiled = weft.compile(data, options=weft.Options(budget_s=0))
    x = drawn(2, 4)
    found = narrow(torch.Tensor, compiled(torch.from_numpy(x)))
    np.testing.assert_allclose(found.numpy(), theirs(data, x)[0], rtol=1e-5)


def test_a_body_may_read_a_value_of_another_type() -> None:
    inner = [helper.make_node("Add", ["u", "u"], ["t"]), helper.make_node("Cast", ["t"], ["b"], to=F)]
    other = [helper.make_node("Cast", ["u"], ["b"], to=F)]
    branches = {
        "then_branch": helper.make_graph(inner, "t", [], [info("b", [3])]),
        "else_branch": helper.make_graph(other, "e", [], [info("b", [3])]),
    }
    nodes = [
        helper.make_node("Cast", ["x"], ["u"], to=TensorProto.UINT32),
        helper.make_node("If", ["c"], ["y"], **branches),
    ]
    data = raw(nodes, [info("c", [], TensorProto.BOOL), info("x", [3])], [info("y", [3])])
    imported = import_onnx(data)
    x = np.array([1, 2, 3], np.float32)
    for c, want in ((True, [2, 4, 6]), (False, [1, 2, 3])):
        assert ours(imported, np.array(c), x)[0].tolist() == want


def test_a_function_of_the_model_may() -> None:
    function = helper.make_function(
        "local", "F", ["a"], ["r"], [helper.make_node("Add", ["a", "a"], ["r"])], [helper.make_opsetid("", 18)]
    )
    m = model(
        [
            helper.make_node("Cast", ["x"], ["u"], to=TensorProto.UINT64),
            helper.make_node("F", ["u"], ["v"], domain="local"),
            helper.make_node("Cast", ["v"], ["y"], to=F),
        ],
        [info("x", [2])], [info("y", [2])], imports=[*IMPORTS, helper.make_opsetid("local", 1)],
    )  # fmt: skip
    m.functions.append(function)
    assert ours(import_onnx(m.SerializeToString()), np.array([3, 4], np.float32))[0].tolist() == [6, 8]


@pytest.mark.parametrize("where", ["input", "output"])
def test_at_the_edge_of_the_model_such_types_are_refused_by_name(where: str) -> None:
    kind = TensorProto.UINT16
    if where == "input":
        data = raw([helper.make_node("Cast", ["x"], ["y"], to=F)], [info("x", [2], kind)], [info("y", [2])])
    else:
        data = raw([helper.make_node("Cast", ["x"], ["y"], to=kind)], [info("x", [2])], [info("y", [2], kind)])
    with pytest.raises(UnsupportedTypeError, match=f"^{where} '[xy]'.*UINT16.*W203") as caught:
        import_onnx(data)
    assert "cast it" in str(caught.value)


def test_a_header_that_lies_is_refused() -> None:
    t = TensorProto(name="w", data_type=TensorProto.UINT32, dims=[4], raw_data=b"\0" * 15)
    data = raw(unsigned(TensorProto.UINT32), [info("x", [4])], [info("y", [4])], [t])
    with pytest.raises(ModelError, match=r"initializer 'w': 15 bytes of data where dimensions \(4,\) need 16 \[W104\]"):
        import_onnx(data)


def test_external_data_of_another_type_is_confined(tmp_path: Path) -> None:
    here = tmp_path / "m"
    here.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"\1" * 16)
    t = TensorProto(name="w", data_type=TensorProto.UINT32, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "../secret.bin"), ("offset", "0"), ("length", "16")):
        t.external_data.add(key=key, value=value)
    m = model(unsigned(TensorProto.UINT32), [info("x", [4])], [info("y", [4])], [t])
    (here / "m.onnx").write_bytes(m.SerializeToString())
    with pytest.raises(ModelError, match=r"secret.bin.*W113"):
        import_onnx(here / "m.onnx")


def without_runtime(data: Any) -> Any:
    return read_model(data, runtime=Absent.INSTALLED)


def test_without_onnxruntime_they_are_refused_by_name() -> None:
    with pytest.raises(NoRuntimeError, match=r"node 1 'gelu' \(BiasGelu\).*W201\]\n.*pip install onnxruntime"):
        without_runtime(NORMED_MODEL)
    data = raw(unsigned(KINDS["uint32"]), [info("x", [4])], [info("y", [4])], weights(w=np.ones(4, np.uint32)))
    with pytest.raises(NoRuntimeError, match=r"'Cast'.*W201"):
        without_runtime(data)


def test_an_operator_that_the_runtime_does_not_have() -> None:
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="com.microsoft", name="f")
    with pytest.raises(NoRuleError, match=r"node 0 'f' \(Frobnicate\).*not a registered function/op \[W201\]"):
        import_onnx(raw([node], [info("x", [2])], [info("y", [2])]))


def test_operators_that_run_what_the_model_names_are_refused() -> None:
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", ep_cache_context="/etc/hostname")
    with pytest.raises(ModelError, match=r"EPContext.*W103"):
        import_onnx(raw([node], [info("x", [2])], [info("y", [2])]))


def test_a_size_that_depends_on_values_is_refused() -> None:
    node = helper.make_node("Unique", ["x"], ["u", "k", "c"], domain="com.microsoft")
    data = raw([node], [info("x", [6])], [info("u", [None])])
    with pytest.raises(UnsupportedError, match="the shape of its result depends on run-time values"):
        import_onnx(data)


def test_a_result_of_another_size_than_the_plan_takes_is_refused() -> None:
    """Whoever made the payload: the values of a call may make another size than those that were tried."""
    node = helper.make_node("Unique", ["x"], ["weft.out.0", "k", "c"], domain="com.microsoft")
    m = model([node], [info("x", [3])], [info("weft.out.0", [3])])
    payload = json.dumps({"model": base64.b64encode(m.SerializeToString()).decode()})
    assert run_onnx(payload, [np.array([1, 2, 3], np.float32)])[0].tolist() == [1, 2, 3]
    with pytest.raises(RefusedError, match=r"shape \[2\], the plan takes \[3\].*W115"):
        run_onnx(payload, [np.array([1, 2, 2], np.float32)])


def test_every_piece_runs_in_the_reading_process_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose types ONNX knows, too."""
    tried = []
    run = Runtime.run
    monkeypatch.setattr(Runtime, "run", noting(lambda self, *a, **k: tried.append(a[2]), run))
    with (tmp_path / "trying").open("w+b") as file:
        data = raw([helper.make_node("Det", ["x"], ["y"], name="d")], [info("x", [5, 5])], [info("y", [])])
        read_model(data, runtime=Runtime(file.fileno(), 1 << 30))
    assert tried == ["node 0 'd' (Det)"]


@pytest.mark.slow
def test_a_death_of_the_runtime_names_the_operator() -> None:
    """A piece that takes more than the reading of a model may."""
    add = [helper.make_node("Add", ["a", "b"], ["c"]), helper.make_node("Neg", ["c"], ["d"])]
    body = helper.make_graph(add, "body", [info("a", []), info("b", [])], [info("c", []), info("d", [])])
    node = helper.make_node("Scan", ["s", "x"], ["t", "y"], body=body, num_scan_inputs=1, name="long")
    n = 10_000_000
    data = raw([node], [info("s", []), info("x", [n])], [info("t", []), info("y", [n])])
    from weft.frontends.onnx import Limits

    with pytest.raises(ParserDiedError, match=r"^node 0 'long' \(Scan\).*2 s.*while ONNX Runtime tried this operator"):
        import_onnx(data, limits=Limits(parse_cpu_s=2))


def test_no_more_operators_than_one_piece_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opaque, "_PIECE_STEPS", 8)
    chain = [helper.make_node("Identity", [f"u{k}"], [f"u{k + 1}"]) for k in range(12)]
    nodes = [
        helper.make_node("Cast", ["x"], ["u0"], to=TensorProto.UINT32), *chain,
        helper.make_node("Cast", ["u12"], ["y"], to=F),
    ]  # fmt: skip
    with pytest.raises(LimitError, match=r"more than 8 operators.*W105"):
        read_model(raw(nodes, [info("x", [2])], [info("y", [2])]))


def test_draws_are_inputs_of_the_right_types() -> None:
    kinds = [TensorType(DType.F32, (3,)), TensorType(DType.BF16, (3,)), TensorType(DType.I64, (3,))]
    for k in range(pieces.DRAWS):
        values = [pieces._drawn(t, k, np.random.default_rng(k)) for t in kinds]
        assert [v.dtype for v in values] == [np.float32, np.float32, np.int64]
        assert values[2].min() >= 0 and values[2].max() <= 1


def test_bf16_crosses_as_float32() -> None:
    node = helper.make_node("QuickGelu", ["b"], ["g"], domain="com.microsoft")
    nodes = [helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16), node]
    data = raw([*nodes, helper.make_node("Cast", ["g"], ["y"], to=F)], [info("x", [4])], [info("y", [4])])
    with pytest.raises(UnsupportedError, match=r"QuickGelu.*W201"):  # it has no kernel for bf16 on a CPU, and says so
        import_onnx(data)


def test_the_graph_is_written_with_their_domains(tmp_path: Path) -> None:
    from weft.frontends.onnx import write_onnx

    imported = import_onnx(NORMED_MODEL)
    write_onnx(imported.graph, tmp_path / "out.onnx")
    x = drawn(2, 3, 8, seed=5)
    got = theirs(Path(tmp_path / "out.onnx").read_bytes(), x)[0]
    np.testing.assert_allclose(got, theirs(NORMED_MODEL, x)[0], rtol=1e-5, atol=1e-6)


def test_a_model_that_needs_no_runtime_does_not_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.frontends.onnx import isolated

    asked = []
    ask = isolated._ask
    monkeypatch.setattr(isolated, "_ask", noting(lambda request, *a: asked.append(request["runtime"]), ask))
    with warnings.catch_warnings():
        import_onnx(raw([helper.make_node("Relu", ["x"], ["y"])], [info("x", [2])], [info("y", [2])]))
        import_onnx(NORMED_MODEL)
    assert asked == ["YET", "YET", ""]
