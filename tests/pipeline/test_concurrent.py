from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft

WAIT_S = 120.0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _module() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).eval()


def _x(rows: int) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def test_a_new_shape_keeps_no_caller_of_a_known_one_waiting(cache: Path) -> None:
    module = _module()
    compiled = weft.compile(module, _x(2), options=weft.Options(budget_s=0, cache_dir=cache))
    again, begun, go, built = compiled._again, threading.Event(), threading.Event(), Counter[int]()

    def slow(inputs: Any, layout: Any) -> Any:
        built[len(inputs[0])] += 1
        begun.set()
        assert go.wait(WAIT_S)
        return again(inputs, layout)

    compiled._again = slow
    with ThreadPoolExecutor(4) as pool:
        new = [pool.submit(compiled, _x(3)) for _ in range(2)]
        assert begun.wait(WAIT_S)
        torch.testing.assert_close(pool.submit(compiled, _x(2)).result(WAIT_S), module(_x(2)))
        assert not any(n.done() for n in new)
        go.set()
        for n in new:
            torch.testing.assert_close(n.result(WAIT_S), module(_x(3)))
    assert built == {3: 1}


def test_many_threads_over_more_shapes_than_are_kept(cache: Path) -> None:
    module = _module()
    compiled = weft.compile(module, _x(1), options=weft.Options(budget_s=0, cache_dir=cache, max_plans=2))
    again = compiled._again
    ready = {}  # what a shape was compiled to: the threads are to meet, not to compile a hundred times

    def quick(inputs: Any, layout: Any) -> Any:
        rows = len(inputs[0])
        if rows not in ready:
            ready[rows] = again(inputs, layout)
        return ready[rows]

    compiled._again = quick
    with torch.no_grad():
        want = {n: module(_x(n)) for n in (1, 2, 3, 4)}

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            rows = chance.choice((1, 2, 3, 4))
            torch.testing.assert_close(compiled(_x(rows)), want[rows])
            assert len(compiled._plans) <= 2

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_a_failing_shape_fails_for_all_who_wait_and_is_tried_again(cache: Path) -> None:
    module = _module()
    compiled = weft.compile(module, _x(2), options=weft.Options(budget_s=0, cache_dir=cache))
    again = compiled._again

    def fails(inputs: Any, layout: Any) -> None:
        raise weft.WeftError(message="no such plan")

    compiled._again = fails  # type: ignore[assignment]
    with pytest.raises(weft.WeftError, match="no such plan"):
        compiled(_x(5))
    compiled._again = again
    torch.testing.assert_close(compiled(_x(5)), module(_x(5)))
