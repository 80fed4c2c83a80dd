"""The sanitizer's table without a GPU: kernels compile, reports find their kernels, silence is not trust."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from tests.generate.cuda.gradients import Text, error_of, exact, normal
from tests.generate.cuda.tensor_emulator import Buffer, Emulated, from_memory, small_integers, to_memory
from tests.generate.cuda.tensor_emulator import run as emulate
from tests.typed import narrow
from tools.sanitize import PLANTED, PLANTED_ENTRY, PLANTED_TEXT, cases, findings, print_table, sources
from tools.sanitize_training import LAYERED, NARROW, Training, contents, run, skipping, trainings

from tools import sanitize
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.generate.bind import BoundCuda, CudaDriver
from weft.generate.cuda.table import NAMED
from weft.ir.types import DType, TensorType
from weft.kernels.formats import Format
from weft.kernels.source import Launch, Pointer

LOG = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at k0123456789abcdef+0x110 in
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f is out of bounds
some program's own line about Invalid planted
========= Error: Race reported between Write access at planted+0x70
=========     and Read access at planted+0xb0 [240 hazards]
=========
========= Warning: Race reported between Read access at k9999999999999999_1+0x70
========= Program hit cudaErrorIllegalAddress (error 700) due to "an illegal memory access" on CUDA API call
=========     Saved host backtrace up to driver entry point at error
========= Invalid __shared__ read of size 8 bytes
=========     at somewhere_else+0x10
========= ERROR SUMMARY: 4 errors
"""
ENTRIES = {"one": ["k0123456789abcdef"], "two": ["k9999999999999999", "k9999999999999999_1"], PLANTED: ["planted"]}


TEMPLATES = {*NAMED, "pools", "scan"}
"""All that there are: those of the table, and those of loops."""


def test_reports_find_their_kernels() -> None:
    assert findings(LOG, ENTRIES) == {"one": 1, "two": 1, PLANTED: 1, "(no kernel)": 1}
    assert findings("", ENTRIES) == {}


@pytest.mark.parametrize(
    ("launched", "found", "why", "status"),
    [
        (ENTRIES, {PLANTED: 1}, "", 0),
        (ENTRIES, {PLANTED: 1, "two": 3}, "", 1),
        (ENTRIES, {}, "", 1),
        ({"one": ["k"]}, {}, "Device not supported", 2),
        (ENTRIES, {PLANTED: 1, "(no kernel)": 1}, "", 1),
        ({}, {}, "it says nothing", 2),
    ],
)
def test_silence_is_not_trust(
    launched: dict[str, list[str]], found: dict[str, int], why: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_table({"memcheck": (launched, Counter(found), why)}) == status
    shown = capsys.readouterr()
    assert why in shown.err and all(label in shown.out for label in [*launched, *found])


def test_a_tool_that_does_not_run_here_is_said(tmp_path: Path) -> None:
    refuses = tmp_path / "compute-sanitizer"
    refuses.write_text("#!/bin/sh\necho '========= Device not supported'\nexit 1\n")
    refuses.chmod(0o700)
    launched, found, why = sanitize.watch("memcheck", str(refuses), 30)
    assert launched == {} and not found and "Device not supported" in why
    refuses.write_text("#!/bin/sh\nsleep 20\n")
    assert "not done after 0.2 s" in sanitize.watch("memcheck", str(refuses), 0.2)[2]


@pytest.mark.slow
def test_every_kernel_is_written_and_compiles(tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    found = list(sources(GpuFacts()))
    assert {label.rstrip(" 0123456789") for label, _, _ in found} == {
        label.rstrip(" 0123456789") for label in cases(GpuFacts())
    }
    entries = [source.entry for _, _, source in found]
    assert len(set(entries)) == len(entries) >= 24
    templates = {dict(source.schedule.params).get("template") for _, _, source in found}
    assert templates >= TEMPLATES | {None}
    for text, flags in [(PLANTED_TEXT, ()), *((s.text, s.flags) for _, _, s in found[::24])]:
        assert Path(nvrtc.compile(text, arch="sm_90a", flags=flags, cache_dir=tmp_path).path).is_file()


PIECES = {
    "swapped": {"w_cluster_sync();", "aside"},
    "together": {"w_raise(", "w_await("},
    "images": {"w_meet<"},
    "grouped": {"namespace m1 {", "w_bar_wait(", "w_cluster_sync();"},
    "normed": {"role.named_barrier_arrive(", "word = w_narrow2_"},
    "leaving": {"mean_[o]"},
    "bytes": {"w_product_s8", "w_product_u8"},
    "boxes": {"w_matrices_store(", "w_stores_commit();"},
    "layers": {"in0", "out1"},
    "attention": {"w_weighted_", "w_group_commit();"},
    "training": {"w_put_sums_of_columns("},
}
"""What the kernels of some labels are launched for."""


@pytest.mark.parametrize("label", list(PIECES))
def test_kernels_of_each_kind_are_launched(label: str) -> None:
    found = [made.text[made.text.index(made.entry) :] for _, _, made in sources(GpuFacts(), [label])]
    missing = [piece for piece in PIECES[label] if not any(piece in text for text in found)]
    assert not missing, missing


def test_products_are_launched_in_every_way_that_their_blocks_work_together() -> None:
    found = {label: dict(source.schedule.params) for label, _, source in sources(GpuFacts(), ["gemm"])}
    assert all(label.startswith("gemm") for label in found)
    assert len(found) >= 18
    tma = [p for p in found.values() if p["template"] == "tma"]
    assert {narrow(int, p.get("multicast", 0)) for p in tma} >= {0, 1, 3, 4}
    for name in ("stream_k", "pingpong"):
        assert any(p.get(name) is True for p in tma)
    assert any(narrow(int, p["split"]) > 1 for p in tma) and any(narrow(int, p.get("two_level", 0)) for p in tma)
    assert {(narrow(int, p["split"]) > 1, p["cluster"]) for p in found.values() if p["template"] == "mma"} >= {
        (True, True), (True, False), (False, False),
    }  # fmt: skip


@pytest.mark.slow
def test_training_is_launched_as_it_is_run(trained: tuple[dict[str, Training], Emulated]) -> None:
    """In the emulation, in buffers between guard zones: gradients are those of float64."""
    made, emulated = trained
    for label, net in NETWORKS.items():
        case = made[label]
        rows = cast("TensorType", case.buffers["x"]).shape[0]
        x, dy, parameters = normal(net, rows)
        buffers = {name: Buffer(len(contents(t, sanitize.values))) for name, t in case.buffers.items()}
        given = {"x": (x, net.input_dtype), "dy": (dy, net.dtype)}
        given |= {f"p{i}": (p, net.masters or net.dtype) for i, p in enumerate(parameters)}
        for name, (data, dtype) in given.items():
            buffers[name].data[:] = to_memory(data, dtype, Format.ROW)
        run(case, {name: b.address for name, b in buffers.items()}, partial(Started, emulated, buffers), 0)
        assert all(b.intact() for b in buffers.values()), label
        found = [from_memory(buffers["dx"].data.copy(), net.input_dtype, x.shape, Format.ROW)]
        sums = buffers["gradients"].data.view(np.float32)
        found += [sums[p.offset : p.offset + p.size].reshape(p.shape) for p in net.slices()]
        eager, wanted = (exact(net, x, dy, parameters, t) for t in (torch.bfloat16, torch.float64))
        error, own = (np.mean([error_of(a, b) for a, b in zip(y, wanted, strict=True)]) for y in (found, eager))
        assert error <= 1.2 * own + 2.0**-9, (label, error, own)


def test_what_stands_beside_layers_adds_up(trained: tuple[dict[str, Training], Emulated]) -> None:
    """Gradients of biases are sums over rows of what the last steps are given; nothing beyond a buffer is written."""
    made, emulated = trained
    net, case = LAYERED, made["training, beside the layers"]
    buffers = {name: Buffer(len(contents(t, sanitize.values))) for name, t in case.buffers.items()}
    for name, t in case.buffers.items():
        buffers[name].data[:] = np.frombuffer(contents(t, sanitize.values), np.uint8)
    run(case, {name: b.address for name, b in buffers.items()}, partial(Started, emulated, buffers), 0)
    assert all(b.intact() for b in buffers.values())
    assert {f"p{i}" for i in range(6)} <= set(buffers) and len(case.entries) == 5
    gradients = buffers["gradients"].data.view(np.float32)
    for layer in range(net.depth - 1):
        (_, bias), given = net.slices_of(layer), buffers[f"sums{layer}"].data.view(np.float32).reshape(70, -1)
        assert bias is not None
        found = gradients[bias.offset : bias.offset + bias.size]
        np.testing.assert_allclose(found, given.sum(0)[: bias.size], rtol=1e-4, atol=1e-4)
    joined = from_memory(buffers["joined0"].data.copy(), net.dtype, (70, 40), Format.ROW)
    x = from_memory(buffers["x"].data.copy(), net.input_dtype, (70, 37), Format.ROW)
    np.testing.assert_array_equal(joined, np.pad(x, ((0, 0), (0, 3))).astype(np.float16))


NETWORKS = {
    "training, in two parts": NARROW, "training, sums inside": NARROW, "training, skips": skipping(),
    "training, skips, sums inside": skipping(),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, Training], Emulated]:
    made = {
        label: case
        for label, case in trainings(GpuFacts()).items()
        if label in (*NETWORKS, "training, beside the layers")
    }
    texts = []
    for case in made.values():
        steps = {s.entry.name: s for s in case.steps}.values()
        launches = [
            Launch(s.entry.name, s.grid, (s.entry.threads, 1, 1), (Pointer("in"),) * len(s.arguments)) for s in steps
        ]
        texts.append(Text(case.text, tuple(launches)))
    return made, Emulated(texts)


class Started:
    """A function of the driver, in the emulation."""

    def __init__(self, emulated: Emulated, buffers: dict[str, Buffer], name: str) -> None:
        self.library, self.name, self.shared = emulated.library, name, 0
        self.library.clear_buffers()
        for b in buffers.values():
            self.library.add_buffer(ctypes.c_void_p(b.address), ctypes.c_long(b.data.size))

    def prepare(self, shared_bytes: int) -> None:
        self.shared = shared_bytes

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[int],
        *,
        shared_bytes: int,
        dependent: bool,
        stream: int,
    ) -> None:
        assert dependent and shared_bytes == self.shared
        numbers = (ctypes.c_uint * 9)(*grid, *block, 1, 1, 1)
        call = getattr(self.library, f"run_{self.name}")
        call.restype = ctypes.c_char_p
        error = call((ctypes.c_void_p * len(arguments))(*arguments), numbers, ctypes.c_uint(shared_bytes), 1)
        assert not error, error.decode()


class Machine:
    """A GPU of which nothing is known but what was asked of it: compiling is real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.launched: list[str] = []
        self.handle = 7
        for name, stand_in in {
            "primary_context": contextlib.nullcontext, "gpu_facts": lambda *_, **__: GpuFacts(), "Stream": lambda: self,
            "device_memory": self.memory, "write": self.write, "fill": lambda *_: None, "Module": lambda _: self,
        }.items():  # fmt: skip
            monkeypatch.setattr(sanitize, name, stand_in)
        driver = CudaDriver(lambda _: self, lambda *_, **__: bytes(128))  # type: ignore[arg-type, return-value]
        monkeypatch.setattr(sanitize, "BoundCuda", partial(BoundCuda, driver=driver))

    @contextlib.contextmanager
    def memory(self, size: int) -> Iterator[int]:
        self.sizes.append(size)
        yield 0x1000 * len(self.sizes)

    def write(self, address: int, data: bytes) -> None:
        assert len(data) <= self.sizes[address // 0x1000 - 1]

    def function(self, entry: str) -> Bound:
        return Bound(self, entry)

    def synchronise(self) -> None:
        pass


class Bound:
    """A function of it, and a launch."""

    def __init__(self, machine: Machine, entry: str) -> None:
        self.machine, self.entry = machine, entry

    def prepare(self, *_: object) -> None:
        pass

    def bind(self, *_: object, **__: object) -> Bound:
        return self

    def launch(self, *_: object, **__: object) -> None:
        self.machine.launched.append(self.entry)


def test_everything_is_launched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    sanitize.launch_all(tmp_path / "report", ["swapped, constant", "training, skips"])
    told = json.loads((tmp_path / "report").read_text())
    assert list(told) == ["swapped, constant", "training, skips", "training, skips, sums inside", PLANTED]
    assert {entry for names in told.values() for entry in names} == set(machine.launched)
    assert machine.launched[0] == f"{machine.launched[1]}_pack" and machine.launched[-1] == PLANTED_ENTRY
    ((_, made, source),) = sources(GpuFacts(), ["swapped, constant"])
    sizes = [made.graph.type_of(n).nbytes for n in (*made.graph.inputs, *made.graph.outputs)]
    assert machine.sizes[: len(sizes) + 1] == [*sizes, *source.packed_bytes]
    skips = trainings(GpuFacts())["training, skips"]
    own = machine.sizes[len(sizes) + 1 :][: len(skips.buffers)]
    assert own == [len(contents(t, sanitize.values)) for t in skips.buffers.values()]


def test_sums_over_rows_have_their_room() -> None:
    """The kernel that also sums its columns writes as many rows of sums as its problem has."""
    ((_, made, source),) = sources(GpuFacts(), ["training, layer's below, with sums"])
    kernels = Emulated([source])
    values, sums = emulate(kernels, made, source, small_integers(made))
    assert sums.shape[0] > 1
    np.testing.assert_allclose(sums.sum(0), values.astype(np.float64).sum(0), rtol=2.0**-7, atol=2.0)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F8E4M3, DType.I8, DType.F16])
def test_values_fill_their_buffers(dtype: DType) -> None:
    t = TensorType(dtype, (7, 5))
    assert len(sanitize.values(t, np.random.default_rng(0))) == t.nbytes
