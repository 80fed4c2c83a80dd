"""Random programs: what makes them, what shrinks them, who judges them; and a few through the compiler."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fuzz import programs
from tests.fuzz.programs import Input, Line, Program, Ref
from tests.slow import few

from benchmarks import random_programs
from weft.device.facts import cpu_facts
from weft.device.files import private_directory
from weft.ir.types import DType

FEW = (2, 3, 6, 10, 12, 14, 16, 25, 34, 48)
"""Each way of `random_programs.FORCED` and the library plan; `budget 2` starts a worker and is left to the long run."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only wait for each other in values so small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(private_directory(tmp_path / "cache")))
    # nothing is timed here: what the system says about the processor is enough
    monkeypatch.setattr("weft.platform.cpu.cpu_facts", lambda cache, **_: cpu_facts(cache, calibrate=False))
    return tmp_path


def test_a_number_makes_one_program_whatever_ran_before() -> None:
    torch.rand(3)
    again = [programs.make(seed) for seed in range(12)]
    torch.manual_seed(5)
    assert again == [programs.make(seed) for seed in range(12)]
    assert len({p.text for p in again}) == 12


def test_programs_are_many_sided() -> None:
    made = [programs.make(seed) for seed in range(50)]
    calls = Counter(line.call for p in made for line in p.lines)
    inputs = [x for p in made for x in p.inputs]
    assert len(calls) >= 60
    assert {x.dtype for x in inputs} >= {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64}
    assert {x.layout for x in inputs} == set(programs.LAYOUTS)
    assert any(0 in x.shape for x in inputs) and any(1 in x.shape for x in inputs)
    assert any(x.same >= 0 for x in inputs) and any(x.special for x in inputs) and any(x.weight for x in inputs)
    assert any(len(p.outputs) > 2 for p in made)


def test_layouts_hold_the_values_they_are_given() -> None:
    values = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).float()
    for layout in programs.LAYOUTS:
        got = programs.laid_out(values, layout)
        assert torch.equal(got, values) or (layout == "expanded" and torch.equal(got[1], values[0]))
        assert got.is_contiguous() == (layout in ("dense", "offset")), layout
    assert programs.laid_out(values, "offset").data_ptr() % 16 == 12


def test_what_rounding_decides_is_left_out() -> None:
    x = programs.Value(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-7], dtype=torch.float64), False, DType.F32)
    assert programs.judged(Line("torch.gt", (Ref(0), 2)), lambda r: x) is None
    assert programs.judged(Line("torch.gt", (Ref(0), 1.5)), lambda r: x) is not None
    assert programs.judged(Line("torch.argmax", (Ref(0),)), lambda r: x) is not None


def plain(*lines: Line, outputs: tuple[Ref, ...]) -> Program:
    x = Input((4, 6), torch.float32, 1, layout="strided")
    return Program(0, (x, replace(x, seed=2)), lines, outputs)


def test_a_failing_program_shrinks_to_the_line_that_fails() -> None:
    program = plain(
        Line("torch.add", (Ref(-1), Ref(-2))),
        Line("torch.relu", (Ref(0),)),
        Line("torch.softmax", (Ref(1),), (("dim", 1),)),
        Line("torch.mul", (Ref(2), 2)),
        outputs=(Ref(3), Ref(1), Ref(0)),
    )
    found = programs.shrink(program, lambda p: any(line.call == "torch.softmax" for line in p.lines))
    assert [line.call for line in found.lines] == ["torch.softmax"]
    assert len(found.outputs) == 1 and [x.layout for x in found.inputs] == ["dense"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda y: y.index_fill(1, torch.tensor([3]), 0.7), "outside"),
        (lambda y: y.half(), "torch.float16"),
        (lambda y: y[:3], "[3, 6]"),
        (lambda y: y * torch.where(y > 1, torch.inf, 1.0), "outside"),
    ],
)
def test_the_judge_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any], said: str) -> None:
    program = plain(Line("torch.exp", (Ref(-1),)), Line("torch.add", (Ref(0), Ref(-2))), outputs=(Ref(1), Ref(0)))
    given = programs.draw(program)
    right = programs.run(program, given)
    assert random_programs.differences(right, random_programs.wanted_of(program, given)) == ""
    monkeypatch.setattr(random_programs, "compiled", lambda *_: lambda *x: (right[0], change(right[1])))
    outcome = random_programs.examine(program, "single", "cpu")
    assert outcome.outcome == "wrong" and said in outcome.note


def test_what_raises_and_what_changes_its_input_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    program = plain(Line("torch.relu", (Ref(-1),)), outputs=(Ref(0),))

    def raising(*_: object) -> None:
        raise RuntimeError("no plan")

    monkeypatch.setattr(random_programs, "compiled", raising)
    assert random_programs.examine(program, "single", "cpu").outcome == "crashed"
    monkeypatch.setattr(random_programs, "compiled", lambda *_: lambda *x: (torch.relu(x[0]), x[1].zero_())[:1])
    assert "input 1 has other values" in random_programs.examine(program, "single", "cpu").note


def test_what_the_framework_refuses_is_drawn_again_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the framework's own run counts as that: what Weft refuses, whatever it raises, is Weft's."""
    program = plain(Line("torch.relu", (Ref(-1),)), outputs=(Ref(0),))
    asked: list[int] = []

    def make(seed: int) -> Program:
        asked.append(seed)
        # a batch norm of cuDNN has two to five dimensions, for example
        return replace(
            program, seed=seed, lines=(Line("torch.mm", (Ref(-1), Ref(-1))),) if seed == 4 else program.lines
        )

    def compiled(p: Program, *_: object) -> random_programs.Call:
        if p.seed == 7:
            raise RuntimeError("no plan")
        return lambda *x: (torch.relu(x[0]),)

    monkeypatch.setattr(programs, "make", make)
    monkeypatch.setattr(programs, "kinds_of_outputs", lambda *_: [DType.F32])
    monkeypatch.setattr(programs, "run", _wide_always(programs.run))
    monkeypatch.setattr(random_programs, "compiled", compiled)
    found = random_programs.run([4, 5, 7], "cpu", 0)
    assert asked == [4, 5, 7, 4 + random_programs.AGAIN]
    assert [(x.seed % random_programs.AGAIN, x.outcome) for x in found] == [
        (4, "refused"), (4, "right"), (5, "right"), (7, "crashed"),
    ]  # fmt: skip
    assert "RuntimeError: mat1 and mat2" in found[0].note
    assert all(random_programs.way_of(x.seed + random_programs.AGAIN) == x.way for x in found)
    end = random_programs.summary(random_programs.lines(found), 3, {})
    assert [end[k] for k in ("total", "right", "crashed", "refused_by_the_framework")] == [3, 2, 1, 1]


def _wide_always(run: Any) -> Any:
    """The reference, which runs elsewhere, does not refuse what the device refuses."""

    def changed(program: Program, given: Any, *, wide: bool = False) -> Any:
        return (torch.relu(given[0]),) if wide else run(program, given)

    return changed


def test_attention_gets_operands_that_its_kernels_can_load() -> None:
    """As PyTorch 2.11 takes them unasked and then ends the use of the GPU."""
    x = programs.draw_one(Input((5, 1, 1, 8), torch.float32, 1, layout="offset"))
    q = programs.draw_one(Input((5, 1, 4, 8), torch.float32, 2))
    assert x.data_ptr() % 16 == 12 and programs.loadable(x).data_ptr() % 16 == 0
    assert programs.loadable(q) is q
    seen: list[torch.Tensor] = []

    def attend(*operands: torch.Tensor, **_: object) -> torch.Tensor:
        seen.extend(operands[:3])
        return operands[0]

    line = Line("programs.attention", (Ref(-1), Ref(-2), Ref(-2)))
    given = (q, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        programs.evaluate(line, lambda r: given[~r.at], wide=False)
    assert [t.data_ptr() % 16 for t in seen] == [0, 0, 0] and torch.equal(seen[1], x)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("seed", few(FEW, 4))
def test_a_few_are_right(seed: int) -> None:
    (outcome,) = random_programs.run([seed], "cpu", 0)
    assert outcome.outcome == "right", f"{outcome}\n{programs.make(seed).text}"


def test_the_record_has_what_is_wrong_and_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = random_programs.Outcome

    def run(seeds: range, device: str, jobs: int) -> list[random_programs.Outcome]:
        return [outcome(s, random_programs.way_of(s), "wrong" if s == 6 else "right", "") for s in seeds]

    monkeypatch.setattr(random_programs, "run", run)
    out = tmp_path / "found.jsonl"
    statuses = []
    for part in ("1/2", "2/2"):
        with pytest.raises(SystemExit) as ended:
            random_programs.main(["--count", "4", "--seed", "4", "--part", part, "--out", str(out)])
        statuses.append(ended.value.code)
    head, case, end = map(json.loads, out.read_text().splitlines())
    assert statuses == [1, 1]  # the second part has the first one's
    assert head["record"] == "environment"
    assert (case["seed"], case["outcome"], case["text"]) == (6, "wrong", programs.make(6).text)
    assert [end[k] for k in ("suite", "total", "right", "wrong", "crashed")] == ["random-programs", 4, 3, 1, 0]
