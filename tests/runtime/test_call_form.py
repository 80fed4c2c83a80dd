"""Saved plans are called as the module is, and give what it gives; a file may say of that whatever somebody wrote."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import weft
from weft.errors import ArtifactError, InputError
from weft.frontends.torch.structure import taken, taken_arguments
from weft.runtime.call_form import MOST_DEPTH, CallForm, Outputs, form_of
from weft.runtime.loaded import Loaded

Pair = namedtuple("Pair", ["first", "second"])  # noqa: PYI024 - what models give


@dataclass
class Found:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, list[torch.Tensor]]
    loss: torch.Tensor | None = None


class Net(nn.Module):
    """Arguments in a dictionary, by name, with defaults; a dataclass as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(
        self, x: dict[str, torch.Tensor], mask: torch.Tensor | None = None, *, scale: float = 2.0, flag: bool = False
    ) -> Found:
        y = self.layer(x["a"]) + x["b"]
        if mask is not None:
            y = y * mask
        return Found(y * scale, (y, [y + 1]))


def kept(module: nn.Module, args: tuple[Any, ...], folder: Path, **named: Any) -> Loaded:
    options = weft.Options(budget_s=0, cache_dir=folder / "cache", keep_worker=False)
    made = weft.compile(module.eval(), args, example_kwargs=named or None, options=options)
    made.save(folder / "plan.weft")
    return weft.load(folder / "plan.weft", options=options)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, dict[str, torch.Tensor], Loaded]:
    torch.manual_seed(3)
    module, x = Net(), {"a": torch.randn(3, 6), "b": torch.randn(3, 6)}
    return module, x, kept(module, (x,), tmp_path_factory.mktemp("saved"))


def test_a_saved_plan_is_called_as_the_module(net: tuple[Net, dict[str, torch.Tensor], Loaded]) -> None:
    module, x, plan = net
    wanted = module(x)
    calls: list[Callable[[], Any]] = [
        lambda: plan(x), lambda: plan(x=x), lambda: plan(x, None), lambda: plan(x, scale=2.0, flag=False),
        lambda: plan(x["a"], x["b"]),
    ]  # fmt: skip
    for call in calls:
        found = call()
        assert isinstance(found, Outputs) and found.keys() == ["logits", "hidden"]
        torch.testing.assert_close(found.logits, wanted.logits)
        torch.testing.assert_close(found[1][1][0], wanted.hidden[1][0])
        assert found.loss is None and found["logits"] is found[0] and len(found) == 2
        assert dict(found.items())["logits"] is found.logits and "logits" in repr(found)
    with pytest.raises(AttributeError, match="no result 'x'; there are logits, hidden"):
        _ = plan(x).x


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p, x: p(x, torch.ones(3, 6)), "2 arguments by place"),
        (lambda p, x: p(x, mask=torch.ones(3, 6)), "2 arguments by place|made without it"),
        (lambda p, x: p(x, scale=3.0), "input scale: the saved plan was made without it"),
        (lambda p, x: p(x, scale=2), "input scale"),
        (lambda p, x: p({"a": x["a"]}), "input x: a dict of 1, where the saved plan takes a dictionary of a, b"),
        (lambda p, x: p({"a": x["a"], "b": 1}), "input x.b: a int, where the saved plan takes a tensor"),
        (lambda p, x: p(x, other=1), "input other"),
        (lambda p, _: p(), "takes 1"),
        (lambda p, x: p(x["a"]), "input x: a Tensor, where the saved plan takes a dictionary"),
        (lambda p, x: p({"a": x["a"], "b": torch.ones(2, 6)}), "shape|3x6"),
    ],
)
def test_another_call_is_refused(
    call: Callable[[Loaded, Any], Any], says: str, net: tuple[Net, dict[str, torch.Tensor], Loaded]
) -> None:
    _, x, plan = net
    with pytest.raises(InputError, match=says):
        call(plan, x)


def test_what_stands_beside_the_tensors_is_part_of_the_plan(tmp_path: Path) -> None:
    module, x = Net(), {"a": torch.randn(2, 6), "b": torch.randn(2, 6)}
    plan = kept(module, (x, torch.full((2, 6), 0.5)), tmp_path, scale=3.0)
    mask = torch.rand(2, 6)
    torch.testing.assert_close(plan(x, mask, scale=3.0).logits, module(x, mask, scale=3.0).logits)
    torch.testing.assert_close(plan(mask=mask, scale=3.0, x=x).logits, module(x, mask, scale=3.0).logits)
    for wrong in (lambda: plan(x, mask), lambda: plan(x, mask, scale=2.0), lambda: plan(x, scale=3.0)):
        with pytest.raises(InputError):
            wrong()


class Plain(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> Any:
        return Pair(x + y, {"sum": (x * y).sum(), 3: x})


def test_tensors_by_place_are_given_by_name_too(tmp_path: Path) -> None:
    x, y = torch.randn(4), torch.randn(4)
    plan = kept(Plain(), (x, y), tmp_path)
    for found in (plan(x, y), plan(x, y=y), plan(y=y, x=x), plan(x, y, factor=1.0)):
        first, second = found
        torch.testing.assert_close(first, x + y)
        torch.testing.assert_close(found.second["sum"], (x * y).sum())
        torch.testing.assert_close(second[3], x)
    for wrong in (lambda: plan(x, y, factor=2.0), lambda: plan(x, z=y), lambda: plan(x, 1), lambda: plan(x)):
        with pytest.raises(InputError):
            wrong()
    flat = plan.flat(x, y)
    assert len(flat) == 3 and all(isinstance(t, torch.Tensor) for t in flat)


leaves = st.sampled_from(["tensor", None, 1, 2.5, "text", True])
trees = st.recursive(
    leaves,
    lambda x: st.one_of(
        st.lists(x, max_size=3), st.lists(x, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", 7]), x, max_size=3),
        st.tuples(x, x).map(lambda p: Pair(*p)), st.dictionaries(st.sampled_from("cd"), x, max_size=2).map(OrderedDict),
    ),
    max_leaves=8,
)  # fmt: skip


def filled(tree: Any, count: list[int]) -> Any:
    if isinstance(tree, str) and tree == "tensor":
        count.append(len(count))
        return torch.tensor([float(count[-1])])
    if isinstance(tree, Pair):
        return Pair(*(filled(x, count) for x in tree))
    if isinstance(tree, dict):
        return type(tree)((k, filled(x, count)) for k, x in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(filled(x, count) for x in tree)
    return tree


def same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return got is want
    if isinstance(want, Pair):
        return isinstance(got, Outputs) and all(same(getattr(got, n), getattr(want, n)) for n in Pair._fields)
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[k], want[k]) for k in want)
    if isinstance(want, list | tuple):
        return type(got) is type(want) and len(got) == len(want) and all(map(same, got, want))
    return type(got) is type(want) and bool(got == want)


@settings(max_examples=150, deadline=None)
@given(tree=trees)
def test_any_structure_comes_back(tree: Any) -> None:
    value = filled(tree, [])
    tensors, layout = taken(value)
    told = layout.to_json()
    assert told is not None
    form = form_of(json.loads(json.dumps(CallForm((), {}, None, told).to_json())), 0, len(tensors))
    assert same(form.made(tensors), value)
    tensors, layout = taken_arguments((value,), {"named": value})
    call: Any = layout.to_json()
    form = form_of(json.loads(json.dumps(CallForm(("x",), {}, call[1], None).to_json())), len(tensors), 0)
    found = form.tensors((value,), {"named": value}, len(tensors))
    assert len(found) == len(tensors) and all(a is b for a, b in zip(found, tensors, strict=True))


def test_what_no_file_keeps_has_no_form() -> None:
    for value in (torch.float32, [float("nan")], {(1, 2): torch.ones(1)}, (object(),)):
        assert taken(value)[1].to_json() is None


GOOD: dict[str, Any] = {
    "names": ["x"],
    "defaults": {"y": 1},
    "arguments": [["u", [["t", 0]]], ["d", []]],
    "results": ["t", 0],
}


def deep(n: int) -> Any:
    found: Any = ["t", 0]
    for _ in range(n):
        found = ["l", [found]]
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"names": "x"}, {"names": [1]}, {"defaults": []}, {"defaults": {"y": [1]}}, {"defaults": {"y": {}}},
        {"arguments": {}}, {"arguments": [["u", []]]}, {"arguments": [["l", [["t", 0]]], ["d", []]]},
        {"arguments": [["u", []], ["d", []]]}, {"arguments": [["u", [["t", 0], ["t", 0]]], ["d", []]]},
        {"arguments": [["u", [["t", 1]]], ["d", []]]}, {"arguments": [["u", [["t", 0]]], ["d", [[3, ["v", 1]]]]]},
        {"arguments": [["u", [["t", True]]], ["d", []]]}, {"results": ["t", 1]}, {"results": ["x", 0]}, {"results": []},
        {"results": ["l", "t0"]}, {"results": ["d", [["a", ["t", 0]], ["a", ["v", 1]]]]},
        {"results": ["d", [[[1], ["t", 0]]]]}, {"results": ["f", [[1, ["t", 0]]]]}, {"results": ["v", {"a": 1}]},
        {"results": ["t", 0, 0]}, {"results": deep(MOST_DEPTH + 1)}, {"results": 3},
    ],
)  # fmt: skip
def test_a_form_that_somebody_wrote_is_looked_at(changes: dict[str, Any]) -> None:
    assert form_of(GOOD, 1, 1).names == form_of({**GOOD, "results": deep(MOST_DEPTH)}, 1, 1).names == ("x",)
    with pytest.raises((TypeError, ValueError)):
        form_of({**GOOD, **changes}, 1, 1)
    with pytest.raises(TypeError):
        form_of([], 1, 1)


def test_a_file_with_a_wrong_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4)
    monkeypatch.setattr(
        CallForm, "to_json", lambda _: {"names": ["x"], "defaults": {}, "arguments": None, "results": ["t", 9]}
    )
    with pytest.raises(ArtifactError, match="cannot be run"):
        kept(nn.ReLU(), (x,), tmp_path)


def test_a_plan_without_a_form_takes_tensors_by_place(tmp_path: Path) -> None:
    plan = kept(nn.ReLU(), (torch.randn(4),), tmp_path)
    old = Loaded(plan.executable)
    x = torch.randn(4)
    torch.testing.assert_close(old(x), x.relu())
    with pytest.raises(InputError, match="tensors by place"):
        old(input=x)
    with pytest.raises(InputError, match="no tensor"):
        old(3)
