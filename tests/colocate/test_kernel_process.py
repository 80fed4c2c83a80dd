"""A job of kernels in a process of its own: what it is told, and that each unit is all kernels once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.colocate import kernel_process as k
from weft.colocate.job import JobError, parse_job

KERNELS = parse_job(
    'name = "work"\nkind = "kernels"\nstages = ["a.toml"]\npasses = 7\nprogress = "p.json"\nmemory = "1GiB"\n'
)


def test_kernels_become_a_process(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "here"'
    folder.mkdir()
    made = k.as_process(KERNELS, folder / "job.toml", tmp_path)
    assert (made.kind, made.file, made.function, made.stages, made.passes, made.progress) == (
        "process", k.FILE, "unit", (), 7, "",
    )  # fmt: skip
    assert made.name == "work" and made.memory_bytes == 1 << 30
    compile((tmp_path / k.FILE).read_text(), k.FILE, "exec")
    process = parse_job('name = "t"\nkind = "process"\nfile = "t.py"\n')
    assert k.as_process(process, tmp_path / "job.toml", tmp_path) is process
    network = parse_job('name = "n"\nkind = "network"\nmodel = "a.onnx"\ninputs = "in"\n')
    with pytest.raises(JobError, match="of a process or of kernels"):
        k.as_process(network, tmp_path / "job.toml", tmp_path)


def test_a_unit_is_all_kernels_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    class Job:
        def put_pass(self, stream: int) -> None:
            launched.append(stream)

    def made(path: Path) -> tuple[Job, Callable[[], int]]:
        assert path == (tmp_path / "job.toml").resolve()
        return Job(), lambda: 7

    monkeypatch.setattr(k, "_on_gpu", made)
    k.as_process(KERNELS, tmp_path / "job.toml", tmp_path)
    spec = importlib.util.spec_from_file_location("kernels", tmp_path / k.FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for number in range(3):
        module.unit(number)
    assert launched == [7, 7, 7]
