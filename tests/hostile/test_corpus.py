"""A file of each hostile family, end to end: a refusal of the model that names what is wrong, and no more."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from tests.hostile.corpus import QUICK, corpus
from tests.hostile.onnx_files import raw
from tools.hostile import ALLOWED_BYTES

import weft


@pytest.mark.parametrize("name", QUICK)
def test_a_hostile_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    root = tmp_path / "model"
    root.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"\0" * 8)
    path = root / "m.onnx"
    path.write_bytes(raw(corpus()[name](root)))
    options = weft.Options(budget_s=0, compile_memory_bytes=ALLOWED_BYTES, cache_dir=tmp_path / "cache")
    warnings.simplefilter("ignore")  # pytest takes it back
    with pytest.raises(weft.WeftError) as caught:
        weft.compile(path, options=options)
    assert caught.value.code.startswith(("W1", "W2")), str(caught.value)
    assert not (tmp_path / "cache").exists(), "nothing was computed"


def test_there_are_two_hundred_files() -> None:
    assert len(corpus()) >= 200
