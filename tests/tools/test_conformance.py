"""Some cases of every kind through the compiled engine, and that the tool sees what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.slow import few
from tests.typed import numbers
from tools.conformance import ENGINES, Run, cases_of, compiled, main, reference, run_case, summary_of, work

from tools import conformance
from weft.device.facts import cpu_facts
from weft.device.files import private_directory
from weft.errors import InvalidGraphError

NATIVE = (
    "abs", "add_bcast", "and3d", "argmax_keepdims_random", "asinh", "attention_4d_causal", "averagepool_2d_strides",
    "batchnorm_epsilon", "cast_FLOAT_to_FLOAT16", "ceil", "clip", "concat_3d_axis_1", "conv_with_strides_padding",
    "cumsum_1d_exclusive", "depthtospace_example", "einsum_batch_matmul", "erf", "expand_dim_changed",
    "gather_elements_1", "gelu_tanh_1", "gemm_all_attributes", "globalmaxpool", "group_normalization_example",
    "instancenorm_epsilon", "isnan", "layer_normalization_2d_axis1", "logsoftmax_large_number", "lrn", "matmul_4d",
    "maxpool_2d_dilations", "mod_mixed_sign_int8", "onehot_with_axis", "pow_types_int64_float32",
    "quantizelinear_axis", "reduce_l2_keep_dims_example", "resize_upsample_scales_cubic",
    "scatter_elements_with_axis", "sce_mean", "slice_neg_steps", "softmax_axis_1", "tile",
    "transpose_all_permutations_3", "tril_neg", "where_long_example", "adam_multiple", "nesterov_momentum",
    "gru_batchwise", "optional_get_element_tensor",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformance, "CACHE", private_directory(tmp_path_factory.mktemp("cache")))
        # nothing is timed here: what the system says about the processor is enough
        patch.setattr("weft.platform.cpu.cpu_facts", lambda cache, **_: cpu_facts(cache, calibrate=False))
        patch.setitem(ENGINES, "fused", partial(compiled, ways=("fused",)))
        yield patch


@pytest.mark.parametrize("name", few(NATIVE, 12))
def test_a_case_through_the_compiler(name: str) -> None:
    line = work(("node", f"test_{name}", "fused"))
    assert line["status"] in ("native", "fallback"), line
    assert line["plans"] == 1


def test_all_ways_of_one_case() -> None:
    line = work(("node", "test_layer_normalization_2d_axis1", "compiled"))
    assert line["status"] == "native", line
    assert line["plans"] == 4
    assert line["generated"] > 4
    assert line["calls"] == 0


def test_a_wrong_plan_is_seen() -> None:
    def engine(imported: Any, inputs: Any) -> Any:
        right = reference(imported, inputs).outputs["reference"]
        return Run({"right": right, "off": [numbers(y) + 1e-3 for y in right]}, {})

    line = run_case(cases_of("node")["test_tanh"], engine)
    assert line["status"] == "wrong"
    assert line["reason"].startswith("off: output 0")


@pytest.mark.parametrize("change", [lambda y: y.astype(np.float64), lambda y: y[..., :1], lambda y: y * np.nan])
def test_types_shapes_and_nan_are_compared(change: Callable[..., Any]) -> None:
    def engine(imported: Any, inputs: Any) -> Any:
        return Run({"it": [change(y) for y in reference(imported, inputs).outputs["reference"]]}, {})

    assert run_case(cases_of("node")["test_tanh"], engine)["status"] == "wrong"


@pytest.mark.parametrize("error", [InvalidGraphError(problem="no plan"), RuntimeError("bad"), KeyError(3)])
def test_a_bug_is_a_crash(error: Exception) -> None:
    def engine(imported: Any, inputs: Any) -> NoReturn:
        raise error

    assert run_case(cases_of("node")["test_tanh"], engine)["status"] == "crashed"


def test_what_is_refused_has_a_reason() -> None:
    line = work(("node", "test_bernoulli", "fused"))
    assert line["status"] == "refused"
    assert "random numbers" in line["reason"]


def test_counts() -> None:
    lines: list[dict[str, Any]] = [
        {"status": "native", "plans": 2, "calls": 0, "generated": 3},
        {"status": "native", "plans": 1, "calls": 1, "generated": 0},
        {"status": "refused"},
        {"status": "crashed"},
    ]
    found = summary_of("node", lines)
    assert (found["total"], found["passed"], found["native"], found["refused"], found["crashed"]) == (4, 2, 2, 1, 1)
    assert (found["without_calls"], found["kernels"]) == (1, 3)


def test_an_interrupted_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conformance, "PROGRESS", tmp_path)
    monkeypatch.setattr(conformance, "cases_of", lambda kind: {"test_add": None, "test_tanh": None})
    kept = [{"case": name, "status": status} for name, status in (("test_add", "native"), ("test_tanh", "wrong"))]
    (tmp_path / "conformance-onnx-node-compiled.jsonl").write_text("".join(json.dumps(x) + "\n" for x in kept))
    given = ["conformance", "--engine", "compiled", "--suites", "node", "--resume", "--record", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", given)
    assert main() == 1
    record = [json.loads(x) for x in (tmp_path / "out" / "conformance-onnx-node.jsonl").read_text().splitlines()]
    assert record[0]["engine"] == "compiled"
    assert record[1:3] == kept
    assert record[3]["native"] == record[3]["wrong"] == 1
    assert "test_tanh" in capsys.readouterr().out
