"""Indices that are checked, on a real GPU: the process outlives a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.pipeline.test_indices import IDS, MASK, Words

import weft
from weft.runtime.indices import IndexOutsideError

pytestmark = pytest.mark.gpu


def test_on_a_gpu_the_process_lives(tmp_path: Path) -> None:
    model = Words().eval().cuda()
    options = weft.Options(budget_s=0, cache_dir=tmp_path, check_indices=True, device="cuda")
    ids, mask = IDS.cuda(), MASK.cuda()
    compiled = weft.compile(model, (ids, mask * 0), options=options)
    torch.testing.assert_close(compiled(ids, mask * 0), model(ids, mask * 0))
    with pytest.raises(IndexOutsideError, match=r"input 0: index 100 at \[0, 0\]"):
        compiled(ids + 100, mask * 0)
    torch.testing.assert_close(compiled(ids, mask * 0), model(ids, mask * 0))
