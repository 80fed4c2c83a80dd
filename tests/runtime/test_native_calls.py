"""Calls of generated kernels on the CPU that come from unusual places, and with unusual tensors."""

from __future__ import annotations

import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.runtime.plans import step_of

from weft.device.facts import cpu_facts
from weft.device.launch import NativeKernel
from weft.device.toolchain import CompiledObject, HostCompiler, find_compiler
from weft.errors import DeviceError
from weft.generate.cpp import CppGenerator
from weft.generate.offer import kernels_of
from weft.ir.graph import Graph, GraphBuilder, bits
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Kind
from weft.kernels.plan import Plan, Step
from weft.kernels.source import KernelSource
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices
from weft.runtime.executable import Executable, Linked
from weft.runtime.runner import Runner

SHAPE = (512, 512)


def graph_of() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, SHAPE))
    return b.build([b.apply(Prim.MUL, b.apply(Prim.ADD, x, 1.0), 2.0)])


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Executable:
    return native_in(tmp_path_factory.mktemp("cache"))


def native_in(cache: Path) -> Executable:
    """(x + 1) * 2, one generated kernel per primitive, by two threads."""
    compiler = find_compiler()
    if not isinstance(compiler, HostCompiler):
        pytest.skip(compiler.reason)
    graph, facts = graph_of(), cpu_facts(None)
    steps: dict[int, Step] = {}
    objects: dict[str, Path] = {}
    for candidate in enumerate_candidates(graph).candidates:
        if candidate.kind is not Kind.SINGLE:
            continue
        choice = format_choices(graph, candidate)[0]
        cut = extract(graph, candidate, choice.inputs, choice.outputs)
        ((_, kernel),) = kernels_of(CppGenerator(), cut.problem, facts, 1).kernels
        assert isinstance(kernel, KernelSource)
        objects[kernel.sha256] = compiler.compile(kernel.text, kernel.flags, cache_dir=cache).path
        steps[min(bits(candidate.members))] = step_of(candidate, cut, kernel)
    plan = Plan("native", tuple(steps[k] for k in sorted(steps)))
    return Executable(Linked(graph, plan, objects, compiler, cache, 2))


def test_a_negated_view_is_not_read_by_its_address(native: Executable) -> None:
    x = torch.randn(SHAPE)
    view = torch._neg_view(x)
    assert view.is_contiguous() and view.data_ptr() == x.data_ptr()
    assert torch.equal(native(view)[0], (1 - x) * 2)


def test_the_default_device_of_the_process_does_not_matter(native: Executable) -> None:
    x = torch.randn(SHAPE)
    with torch.device("meta"):
        (found,) = native(x)
    assert found.device.type == "cpu"
    assert torch.equal(found, (x + 1) * 2)


def test_a_forked_process_runs_kernels_too(native: Executable) -> None:
    """OpenMP's threads do not live on in a child: it must not wait for them."""
    x = torch.randn(SHAPE)
    want = native(x)[0]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        same = bool((native(x)[0].numpy() == want.numpy()).all())
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/maps")
def test_the_objects_of_a_plan_are_loaded_as_long_as_it_lives(native: Executable, tmp_path: Path) -> None:
    native(torch.zeros(SHAPE))  # whose objects hold the OpenMP runtime
    plan = native_in(tmp_path)
    objects = [str(path) for path in plan.linked.objects.values()]
    assert len(objects) == 2
    x = torch.randn(SHAPE)
    for _ in range(2):
        assert torch.equal(plan(x)[0], (x + 1) * 2)
        gc.collect()
        assert all(path in Path("/proc/self/maps").read_text() for path in objects)
    del plan
    gc.collect()
    assert not any(path in Path("/proc/self/maps").read_text() for path in objects)


def test_objects_that_were_taken_away_are_made_again(native: Executable, tmp_path: Path) -> None:
    """Whoever cleans the cache may do so between an object is found there and it is loaded."""
    gone = {sha: tmp_path / "cache" / path.name for sha, path in native.linked.objects.items()}
    (tmp_path / "cache").write_text("no folder")
    plan = Executable(replace(native.linked, objects=gone))
    x = torch.randn(SHAPE)
    assert torch.equal(plan(x)[0], (x + 1) * 2)
    with pytest.raises(DeviceError, match="cannot load kernel"):
        NativeKernel(next(iter(gone.values())), "entry")


def test_the_runner_is_made_again_where_it_was_taken_away(
    native: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile, asked = HostCompiler.compile, []

    def once(self: HostCompiler, text: str, **given: Path | None) -> CompiledObject:
        asked.append(given.get("cache_dir"))
        made = compile(self, text, cache_dir=given.get("cache_dir"))
        if asked[-1] is not None:
            made.path.unlink()
        return made

    assert native.linked.compiler is not None
    monkeypatch.setattr(HostCompiler, "compile", once)
    Runner(native.linked.compiler, tmp_path)
    assert asked == [tmp_path, None]
