"""Inputs and results of a network: folders of .npz files, read and written by a process of its own."""

from __future__ import annotations

import ctypes
import io
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.colocate import inference_feed, inference_files
from weft.colocate.inference_feed import InferenceFeed
from weft.colocate.inference_files import (
    Array,
    InputReader,
    TensorSpec,
    input_files,
    members,
    named,
    read_into,
    write_results,
)
from weft.colocate.inference_ring import LEAST_SLOTS, MOST_SLOTS, ring_bytes, slots_of
from weft.colocate.job import JobError, parse_job
from weft.errors import ArtifactError, DeviceError
from weft.kernels.scheduling import JobSpec

INPUTS = (TensorSpec("x", (2, 3), "float32"), TensorSpec("mask", (4,), "bool"))
OUTPUTS = (TensorSpec("y", (2,), "float16"), TensorSpec("n", (), "int64"))
TEXT = 'name = "net"\nkind = "network"\nmodel = "net.onnx"\ninputs = "in"\n'


def drawn(number: int) -> dict[str, Array]:
    rng = np.random.default_rng(number)
    return {"x": rng.standard_normal((2, 3)).astype(np.float32), "mask": rng.random(4) > 0.5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for i in range(3):
        np.savez(tmp_path / "in" / f"{i}.npz", **drawn(i))  # type: ignore[arg-type]
    return tmp_path


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(
    folder: Path, held: ExitStack, *, first: int = 0, end: int = 0, outputs: str = "out", **more: Any
) -> InferenceFeed:
    spec: JobSpec = parse_job(TEXT + (f'outputs = "{outputs}"\n' if outputs else ""))
    return InferenceFeed(spec, folder, INPUTS, OUTPUTS, span=lambda _: (first, end), held=held, **more)


def at(places: Any, tensors: tuple[TensorSpec, ...]) -> list[Array]:
    """What lies at these addresses."""
    found = []
    for place, spec in zip(places, tensors, strict=True):
        raw = (ctypes.c_uint8 * spec.nbytes).from_address(place)
        found.append(np.frombuffer(memoryview(raw).cast("B"), spec.dtype).reshape(spec.shape))
    return found


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


# -- files


def test_files_are_in_the_order_of_their_names(folder: Path) -> None:
    for name in ("10.npz", "2.txt", ".hidden"):
        (folder / "in" / name).write_bytes(b"")
    (folder / "in" / "sub.npz").mkdir()
    assert input_files(folder / "in") == ["0.npz", "1.npz", "10.npz", "2.npz"]


def test_no_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no \.npz file is in this folder"):
        input_files(tmp_path)
    with pytest.raises(JobError, match="cannot be read: No such file"):
        input_files(tmp_path / "none")


def places() -> list[Array]:
    return [np.zeros(x.shape, x.dtype) for x in INPUTS]


def test_members_are_found_by_name_by_number_or_because_there_is_one(tmp_path: Path) -> None:
    x, mask = drawn(0).values()
    found = places()
    for arrays in ({"mask": mask, "x": x}, {"arr_0": x, "arr_1": mask}):
        np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
        read_into(tmp_path / "a.npz", INPUTS, found)
        assert np.array_equal(found[0], x) and np.array_equal(found[1], mask)
    np.savez_compressed(tmp_path / "b.npz", whatever=x)
    read_into(tmp_path / "b.npz", INPUTS[:1], found[:1])
    assert list(members(tmp_path / "b.npz")) == ["whatever"]


def bomb(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content)
        archive.writestr("mask.npy", b"")


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.zeros((2, 3), np.float32)}, "it has no 'mask', but x"),
        ({"x": np.zeros((2, 4), np.float32), "mask": np.zeros(4, bool)}, r"expected .*, got float32\[2, 4\]"),
        ({"x": np.zeros((2, 3)), "mask": np.zeros(4, bool)}, r"expected x: float32\[2, 3\], got float64"),
        ({"x": np.array([None] * 6).reshape(2, 3), "mask": np.zeros(4, bool)}, "Object arrays cannot be loaded"),
    ],
)  # fmt: skip
def test_inputs_that_are_none_of_the_networks(tmp_path: Path, arrays: dict[str, Array], says: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(JobError, match=f"a.npz: inputs: {says}"):
        read_into(tmp_path / "a.npz", INPUTS, places())


def test_files_that_are_no_archives(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    bomb(path, b"\0" * (1 << 24))
    with pytest.raises(JobError, match="16777216 bytes, expected x"):
        read_into(path, INPUTS, places())
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((2, 3), np.float32))
    for content in (b"", b"PK\3\4 and no more", buffer.getvalue()):
        path.write_bytes(content)
        with pytest.raises(JobError, match=r"a\.npz: inputs: "):
            read_into(path, INPUTS, places())
        with pytest.raises(JobError, match=r"a\.npz: inputs: "):
            members(path)
    bomb(path, buffer.getvalue()[:-5])
    with pytest.raises(JobError):
        read_into(path, INPUTS, places())


def test_bytes_are_taken_as_they_lie_where_they_lie_as_in_memory(tmp_path: Path) -> None:
    x, mask = drawn(0).values()
    path, found = tmp_path / "a.npz", places()
    np.savez(path, x=x, mask=mask)
    where = read_into(path, INPUTS, found)
    raw = path.read_bytes()
    assert [raw[a : a + v.nbytes] for a, v in zip(where, (x, mask), strict=True)] == [x.tobytes(), mask.tobytes()]
    for save in (np.savez_compressed, lambda p, **v: np.savez(p, x=np.asfortranarray(v["x"]), mask=v["mask"])):
        save(path, x=x, mask=mask)
        found = places()
        assert read_into(path, INPUTS, found) == () and np.array_equal(found[0], x) and np.array_equal(found[1], mask)


@pytest.mark.parametrize("again", [False, True])
def test_an_array_whose_checksum_is_wrong(tmp_path: Path, again: bool) -> None:
    """Also in a file that was right when it was read before."""
    path, found = tmp_path / "a.npz", places()
    reader = InputReader(tmp_path, INPUTS)
    np.savez(path, **drawn(0))  # type: ignore[arg-type]
    if again:
        reader.read(path.name, found)
    raw = bytearray(path.read_bytes())
    raw[read_into(path, INPUTS, found)[0] + 5] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(1, 1))
    with pytest.raises(JobError, match=r"a\.npz: inputs: Bad CRC-32 for file 'x\.npy'"):
        reader.read(path.name, found)


def test_files_that_were_read_are_read_anew_where_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[str] = []

    def counted(path: Path, *given: Any) -> tuple[int, ...]:
        whole.append(path.name)
        return read_into(path, *given)

    monkeypatch.setattr(inference_files, "read_into", counted)
    reader, found = InputReader(tmp_path, INPUTS, most=2), places()
    for number, (name, reads) in enumerate([("a", 1), ("b", 1), ("a", 0), ("c", 1), ("c", 1), ("b", 0)]):
        if reads and name not in {w[0] for w in whole}:
            np.savez(tmp_path / f"{name}.npz", **drawn(number))  # type: ignore[arg-type]
        before = len(whole)
        reader.read(f"{name}.npz", found)
        with np.load(tmp_path / f"{name}.npz") as wanted:
            assert np.array_equal(found[0], wanted["x"]) and np.array_equal(found[1], wanted["mask"])
        assert len(whole) - before == reads, name  # of two files is remembered where arrays lie
    np.savez(tmp_path / "new.npz", y=np.zeros(9), **drawn(7))  # type: ignore[arg-type]
    (tmp_path / "new.npz").replace(tmp_path / "a.npz")
    reader.read("a.npz", found)
    assert np.array_equal(found[0], drawn(7)["x"])
    with (tmp_path / "b.npz").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(JobError, match=r"b\.npz: inputs: "):
        reader.read("b.npz", found)
    (tmp_path / "b.npz").unlink()
    with pytest.raises(JobError, match=r"b\.npz: inputs: No such file"):
        reader.read("b.npz", found)


def test_results_are_written_whole(tmp_path: Path) -> None:
    values = [np.array([1, 2], np.float16), np.array(7)]
    write_results(tmp_path / "r.npz", OUTPUTS, values)
    with np.load(tmp_path / "r.npz") as found:
        assert list(found) == ["y", "n"] and np.array_equal(found["y"], values[0]) and found["n"] == 7
    assert [x.name for x in tmp_path.iterdir()] == ["r.npz"], "nothing lies beside it"
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_results(tmp_path / "none" / "r.npz", OUTPUTS, values)


def test_names_of_tensors() -> None:
    assert named(("x", "/out:0"), 2) == ("x", "/out:0")
    for names in ((), ("x",), ("x", "x"), ("x", "")):
        assert named(names, 2) == ("arr_0", "arr_1")


# -- the process


def test_inputs_come_in_order_and_results_go_to_files(folder: Path, held: ExitStack) -> None:
    feed = started(folder, held, first=1)
    assert feed.files == ("0.npz", "1.npz", "2.npz")
    for k in range(35):  # twice through the ring
        feed.wait_ready(k)
        wanted = list(drawn((1 + k) % 3).values())
        assert all(np.array_equal(a, b) for a, b in zip(at(feed.inputs(k), INPUTS), wanted, strict=True))
        y, n = at(feed.results(k), OUTPUTS)
        y[...], n[...] = k, 100 + k
        feed.release(k)
        feed.put(k)
    feed.finish()
    assert feed.written == 35
    for file, last in (("0.npz", 32), ("1.npz", 33), ("2.npz", 34)):
        with np.load(folder / "out" / file) as found:
            assert found["n"] == 100 + last and found["y"].tolist() == [last, last], "of the last pass"


def test_no_more_is_read_than_there_is_room_for(folder: Path, held: ExitStack) -> None:
    feed = started(folder, held)
    n = feed.slots
    assert n == MOST_SLOTS
    feed.wait_ready(n - 1)
    time.sleep(0.05)
    assert not feed.is_ready(n), "no slot was released"
    feed.release(0)
    until(lambda: feed._ring.word("filled") == n + 1)
    assert not feed.is_ready(n), "there is no room for its results"
    feed.put(0)
    feed.wait_ready(n)


def test_large_inferences_have_fewer_places() -> None:
    large = TensorSpec("x", (1 << 24,), "float32")
    assert slots_of([large], []) == LEAST_SLOTS and slots_of([TensorSpec("x", (1 << 22,), "float32")], ()) == 7
    assert ring_bytes([large], []) < 5 * large.nbytes


def test_the_last_inference_is_the_last(folder: Path, held: ExitStack) -> None:
    feed = started(folder, held, first=2, end=4, outputs="")
    feed.wait_ready(1)
    assert not feed.results(0) and not (folder / "out").exists()
    feed.release(1)
    feed.put(1)
    feed.finish()
    time.sleep(0.02)
    assert not feed.is_ready(2)


def test_what_is_measured_by_has_a_place_of_its_own(folder: Path, held: ExitStack) -> None:
    feed = started(folder, held, first=3, end=3)  # all is done: nothing is read
    assert all(np.array_equal(a, b) for a, b in zip(at(feed.inputs(-1), INPUTS), drawn(0).values(), strict=True))
    assert len(set(feed.results(-1)) | {p for k in range(feed.slots) for p in feed.results(k)}) == 2 * (feed.slots + 1)


def test_an_input_that_cannot_be_read_is_told_when_it_is_its_turn(folder: Path, held: ExitStack) -> None:
    (folder / "in" / "1.npz").write_bytes(b"broken")
    feed = started(folder, held)
    feed.wait_ready(0)
    until(lambda: feed._ring.word("failed") > 0)
    assert feed.is_ready(0)
    feed.put(0)
    feed.finish()
    assert (folder / "out" / "0.npz").is_file(), "results of those before are written"
    with pytest.raises(JobError, match=r"1\.npz: inputs: File is not a zip file"):
        feed.is_ready(1)


def test_the_first_input_is_looked_at_before_anything_is_started(folder: Path, held: ExitStack) -> None:
    (folder / "in" / "0.npz").write_bytes(b"broken")
    with pytest.raises(JobError, match=r"0\.npz: inputs"):
        started(folder, held)


def test_results_that_cannot_be_written(folder: Path, held: ExitStack) -> None:
    feed = started(folder, held)
    (folder / "out").rmdir()
    feed.put(0)
    with pytest.raises(ArtifactError, match="results cannot be written"):
        feed.finish()
    with pytest.raises(ArtifactError, match="results cannot be written"):
        feed.is_ready(0)
    assert feed.written == 0


def test_a_folder_of_results_that_cannot_be(folder: Path, held: ExitStack) -> None:
    (folder / "file").write_bytes(b"")
    with pytest.raises(ArtifactError, match="cannot be made"):
        started(folder, held, outputs="file")
    (folder.parent / "elsewhere").mkdir(exist_ok=True)
    (folder / "link").symlink_to(folder.parent / "elsewhere")
    with pytest.raises(JobError, match="leads out of the folder"):
        started(folder, held, outputs="link")
    with pytest.raises(JobError, match="results would replace the inputs"):
        started(folder, held, outputs="in")


def test_a_process_that_dies_is_told(folder: Path, held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = started(folder, held, command=(sys.executable, "-c", "import sys; sys.exit(3)"))
    with pytest.raises(DeviceError, match="ended with 3, and has read no input"):
        feed.wait_ready(0)
    with pytest.raises(DeviceError, match="cannot be started"):
        started(folder, held, command=("/no/such/program",))
    monkeypatch.setattr(inference_feed, "LIMIT_S", 0.2)
    still = started(folder, held, command=(sys.executable, "-c", "import time; time.sleep(60)"))
    with pytest.raises(DeviceError, match=r"has read no input in 0\.2 s"):
        still.wait_ready(0)
    still._process.kill()


def test_nothing_is_left_running(folder: Path) -> None:
    with ExitStack() as held:
        feed = started(folder, held)
        feed.wait_ready(0)
        process = feed._process
        assert process.poll() is None
    assert process.returncode == 0
