"""The embedded server with real plans: in this process, and in one of its own that is killed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.serve.conftest import Saved, mlp

import weft
from weft.errors import ArtifactError, OptionError, RefitError
from weft.serve import ServeOptions, Server, Source
from weft.serve.errors import RequestError, UnavailableError, UnknownModelError
from weft.serve.process import ProcessBackend
from weft.serve.settings import found_in, sources


def rows(count: int, seed: int = 0, width: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def close(a: npt.ArrayLike, b: npt.ArrayLike) -> bool:
    return bool(np.allclose(a, b, rtol=1e-4, atol=1e-5))


def test_queries_of_any_rows_in_this_process(saved: Saved) -> None:
    with Server({"mlp": [saved.eight, saved.one]}, saved.options(isolated=False)) as server:
        signature = server.model("mlp").signature
        assert signature.packs and signature.sizes == (1, 8)
        given = [rows(1 + i % 8, i) for i in range(50)]
        futures = [server.submit(x) for x in given]
        for x, future in zip(given, futures, strict=True):
            (y,) = future.result(30)
            assert y.shape == (len(x), 4) and close(y, saved.answer("mlp", x)[0])


def test_what_a_model_does_not_take_is_told(saved: Saved) -> None:
    with Server(saved.eight, saved.options(isolated=False, max_batch=4)) as server:
        for bad, why in (
            (rows(0), "0 rows"), (rows(9), "9 rows"), (rows(2)[:, :3], "has shape"),
            (rows(2).astype(np.float64), "FP64"),
            (np.float32(1), "has shape"), ([rows(1), rows(1)], "takes 1 tensors"), ({"y": rows(1)}, "no input 'y'"),
            ({}, "is missing"), (rows(5), "5 rows, the server takes 4"),
        ):  # fmt: skip
            with pytest.raises(RequestError, match=why):
                server.submit(bad)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="a timeout of 0"):
            server.submit(rows(1), timeout_s=0)
        with pytest.raises(UnknownModelError, match="no model 'nobody'"):
            server.submit(rows(1), model="nobody")
        with pytest.raises(UnknownModelError, match="no version '2'"):
            server.submit(rows(1), model="eight", version="2")


def test_rows_that_know_each_other_are_not_mixed(saved: Saved) -> None:
    with Server({"m": saved.mixing, "t": saved.two}, saved.options(isolated=False)) as server:
        signature = server.model("m").signature
        assert not signature.packs and "reduces over the rows" in signature.reason
        x = rows(3, width=5)
        assert close(server.submit(x, model="m").result(30)[0], saved.answer("mixing", x)[0])
        with pytest.raises(RequestError, match=r"has shape \[2, 5\], the model takes \[3, 5\]"):
            server.submit(x[:2], model="m")
        with pytest.raises(RequestError, match="has 2 models"):
            server.submit(x)
        half, flag = x.astype(np.float16), np.array([True, False, True])
        a, b = server.submit([half, flag], model="t").result(30)
        assert close(a, np.where(flag[:, None], half * 3, half)) and (b == half.argmax(1)).all()
        assert a.dtype == np.float16 and b.dtype == np.int64


def test_files_that_do_not_belong_together_are_refused(saved: Saved) -> None:
    for files, why in (
        ([saved.eight, saved.other], "of one size"), ([saved.eight, saved.two], "differ"),
        ([saved.one, saved.mixing], "several batch sizes: .*reduces"),
    ):  # fmt: skip
        with pytest.raises(ArtifactError, match=why):
            Server({"m": files}, saved.options(isolated=False))
    with pytest.raises(ArtifactError, match="is neither a saved plan nor"):
        Server({"m": object()}, saved.options())


def test_a_compiled_model_is_refitted_while_it_is_served(saved: Saved, tmp_path: Path) -> None:
    module, fresh = mlp(), mlp()
    x = rows(8)
    options = weft.Options(budget_s=0, threads=1, cache_dir=tmp_path)
    with Server({"m": weft.compile(module, torch.from_numpy(x), options=options), "s": saved.eight},
                saved.options(isolated=False)) as server:  # fmt: skip
        before, after = (m(torch.from_numpy(x)).detach().numpy() for m in (module, fresh))
        assert close(server.submit(x, model="m").result(30)[0], before)
        server.refit("m", fresh.state_dict(), recompile=True)
        assert close(server.submit(x, model="m").result(30)[0], after)
        with pytest.raises(RefitError, match="a saved plan holds no model"):
            server.refit("s", fresh.state_dict())


def test_a_worker_that_is_killed_costs_no_answer(saved: Saved) -> None:
    with Server({"mlp": [saved.one, saved.eight]}, saved.options(threads=1)) as server:
        served = server.model("mlp")
        assert isinstance(served.backend, ProcessBackend)
        given = [rows(1 + i % 8, i) for i in range(200)]
        futures = [server.submit(x) for x in given]
        os.kill(served.backend.pid, signal.SIGKILL)
        for x, future in zip(given, futures, strict=True):
            assert close(future.result(60)[0], saved.answer("mlp", x)[0])
        assert served.restarts == 1 and server.ready
        with pytest.raises(RefitError, match="is a saved plan"):
            server.refit("mlp", {})


@pytest.mark.slow
def test_a_file_is_replaced_without_a_moment_of_nothing(saved: Saved, tmp_path: Path) -> None:
    file = tmp_path / "m.weft"
    shutil.copy(saved.eight, file)
    x = rows(3)
    old, new = saved.answer("mlp", x)[0], saved.answer("other", x)[0]
    with Server(file, saved.options(threads=1)) as server:
        shutil.copy(saved.other, tmp_path / "fresh")
        os.replace(tmp_path / "fresh", file)
        backend = server.model("m").backend
        assert isinstance(backend, ProcessBackend)
        os.kill(backend.pid, signal.SIGKILL)  # what is loaded stays what it was
        assert close(server.submit(x).result(60)[0], old)
        futures = [server.submit(x) for _ in range(50)]
        server.load("m")
        assert close(server.submit(x).result(60)[0], new)
        assert all(close(f.result(60)[0], old) for f in futures)
        file.write_bytes(b"no plan")
        with pytest.raises(ArtifactError, match="is no readable plan"):
            server.load("m")
        assert close(server.submit(x).result(60)[0], new)
        server.unload("m")
        with pytest.raises(UnavailableError, match="is not loaded"):
            server.submit(x, model="m")
        assert [(r.name, r.state) for r in server.index()] == [("m", "UNAVAILABLE")]
        for action in (server.load, server.unload):
            with pytest.raises(UnknownModelError):
                action("nobody")


def test_a_server_that_drains_takes_nothing_more(saved: Saved) -> None:
    with Server(saved.eight, saved.options(isolated=False)) as server:
        futures = [server.submit(rows(8, i)) for i in range(20)]
        assert server.drain(30) and all(f.done() for f in futures)
        assert not server.ready and server.draining
        with pytest.raises(UnavailableError, match="shutting down"):
            server.submit(rows(1), model="eight")


def test_a_directory_of_models(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "b" / "2").mkdir(parents=True)
    (tmp_path / "b" / "10").mkdir()
    (tmp_path / "b" / "notes").mkdir()
    (tmp_path / "readme.txt").touch()
    shutil.copy(saved.mixing, tmp_path / "a.weft")
    shutil.copy(saved.eight, tmp_path / "b" / "2")
    shutil.copy(saved.other, tmp_path / "b" / "10")
    with Server([], saved.options(isolated=False), directory=tmp_path) as server:
        assert server.versions("b") == ["2", "10"]
        x = rows(2)
        assert close(server.submit(x, model="b").result(30)[0], saved.answer("other", x)[0])
        assert close(server.submit(x, model="b", version="2").result(30)[0], saved.answer("mlp", x)[0])
        shutil.copy(saved.one, tmp_path / "c.weft")
        server.load("c")
        assert close(server.submit(x[:1], model="c").result(30)[0], saved.answer("mlp", x[:1])[0])
    (tmp_path / "c" / "1").mkdir(parents=True)
    shutil.copy(saved.one, tmp_path / "c" / "1")
    with pytest.raises(OptionError, match="is there twice"):
        found_in(tmp_path)
    with pytest.raises(OptionError, match="No such file"):
        found_in(tmp_path / "nowhere")


def test_how_files_are_named() -> None:
    found = sources(["a.weft", "n=x/b.weft,c.weft", "n:3=d.weft"])
    assert found == [
        Source("a", "1", (Path("a.weft"),)), Source("n", "1", (Path("x/b.weft"), Path("c.weft"))),
        Source("n", "3", (Path("d.weft"),)),
    ]  # fmt: skip
    for bad, why in (
        (["a.weft", "b/a.weft"], "given twice"), (["n="], "names no file"), (["n:x=a"], "is no version"),
        (["../x=a"], "is no name"), ([".weft"], "is no name"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=why):
            sources(bad)


def test_settings_that_are_none() -> None:
    for name, value in (
        ("timeout_s", 0), ("max_delay_s", -1), ("drain_s", float("inf")), ("max_queries", 0), ("threads", -1),
        ("worker_timeout_s", float("nan")),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=name):
            ServeOptions(**{name: value})  # type: ignore[arg-type]


def test_an_idle_server_ends_quickly(saved: Saved) -> None:
    server = Server(saved.eight, saved.options(isolated=False))
    began = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - began < 5
