"""Latency-critical kernels: as the networks have them, bound to plain buffers, fused, and refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.cases.colocate_lc import (
    FILE,
    WARPGROUPS,
    Recorded,
    drawn,
    from_json,
    hosts,
    lc_kernel,
    lc_names,
    lc_source,
    linear_node,
    recorded,
    to_json,
)
from benchmarks.data import latency_critical
from benchmarks.data.latency_critical import MOST, NETWORKS, costliest, difference, main, shape_name
from benchmarks.gpu_pairs import job_of
from tests.generate.test_bind import Recorder
from tests.generate.test_bind_fused import Driver
from tests.slow import few

from weft.device.cuda.facts import profile
from weft.errors import ArtifactError
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.bind_fused import BoundFused
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.fused import fuse, shapes
from weft.generate.cuda.role.role import RoleSource
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.colocation import FusedSource

H200 = profile("h200")


@pytest.mark.slow
@pytest.mark.parametrize("network", few(NETWORKS, 1))
def test_the_file_is_what_the_networks_give(network: str) -> None:
    was = [r for r in recorded().values() if r.name.startswith(f"{network}/")]
    said = difference(was, costliest(network))
    assert not said, f"{said}: make the file again with `python -m benchmarks.data.latency_critical {network}`"


def test_two_kernels_of_each_network() -> None:
    names = lc_names()
    assert [n.partition("/")[0] for n in names] == [n for n in NETWORKS for _ in range(MOST)]
    for name in names:
        kernel = lc_kernel(name)
        assert name.partition("/")[2] == shape_name(kernel.problem.graph)
        assert {b.type.dtype for b in (*kernel.inputs, *kernel.outputs)} == {DType.F16}
        assert kernel.bytes == sum(b.nbytes for b in (*kernel.inputs, *kernel.outputs))
        floor_us = max(kernel.flops / 989e6, kernel.bytes / 4.8e6)
        assert floor_us < kernel.timed[0].us < 12 * floor_us, "a time that an H200 can have had"
        assert [t.us for t in kernel.timed] == sorted(t.us for t in kernel.timed)
        own = next(t.schedule for t in kernel.timed if t.schedule.generator == "cuda")
        assert own == kernel.schedules[0] and own.param("template") in WARPGROUPS
    with pytest.raises(ValueError, match=r"no latency-critical kernel 'vgg16/none'; there are vgg16/conv3x3-64-224"):
        lc_kernel("vgg16/none")


def test_operations_are_counted() -> None:
    kernel = lc_kernel("bert_base/product-2048x3072x768")
    assert kernel.flops == 2 * 2048 * 3072 * 768
    assert kernel.bytes == 2 * (2048 * 768 + 768 * 3072 + 3072 + 2048 * 3072)
    assert lc_kernel("vgg16/conv3x3-512-28").flops == 2 * 16 * 28 * 28 * 512 * 512 * 9


@pytest.mark.parametrize("name", lc_names())
def test_schedules_are_the_choosers_and_all_others_once(name: str) -> None:
    kernel = lc_kernel(name)
    offered = CudaGenerator().schedules(kernel.problem, H200)
    assert not isinstance(offered, Declined)
    assert len(set(kernel.schedules)) == len(kernel.schedules) > 1000
    at = [kernel.schedules.index(s) for s in offered]
    first = [t.schedule for t in kernel.timed if t.schedule.generator == "cuda"]
    assert max(at) < len(offered) + len(first), "the chooser's stand in front of those that it would not offer"
    others = [s for s in offered if s not in first]
    assert [s for s in kernel.schedules if s in others] == others, "in its order"


@pytest.mark.parametrize("name", few(lc_names(), 3))
def test_a_host_is_packed_run_and_fused_with_plain_buffers(name: str) -> None:
    kernel, job = lc_kernel(name), job_of("cp", small=True)
    found = hosts(kernel, H200, 3)
    assert len(found) == 3 and len({s.schedule for s in found}) == 3
    for source in found:
        assert source.schedule.param("template") in WARPGROUPS
        alone = solo(source, "lc")
        inputs = [0x1000 * (1 + i) for i in range(len(kernel.inputs))]
        outputs = [0x90000 + 0x1000 * i for i in range(len(kernel.outputs))]
        packed = [0xA0000 + 0x1000 * i for i in range(len(alone.packed_bytes))]
        at = Addresses(inputs, outputs, packed, 0xB0000, 0xC0000)
        seen = Recorder()
        bound = BoundCuda(alone, Path("/nowhere/lc.cubin"), driver=seen.driver)
        bound.pack(kernel.weights(inputs), packed, 5)
        assert len(seen.launched) == len(source.pack) == 1, "weights are repacked by one launch"
        bound.prepare(at)(5)
        assert len(seen.launched) == 2
        made = _fused(source, job.sources)
        together = Driver(registers=255)
        named = {p.buffer for m in job.stages for p in m.manifest.parameters if p.kind != "scalar"}
        be = job.addresses({n: 0xD0000 + 0x1000 * i for i, n in enumerate(sorted(named))})
        BoundFused(made, Path("/nowhere/x.cubin"), driver=together.driver).prepare([at, *be], 0xF0000)(5)
        ((_, arguments, _, _),) = together.launched
        assert arguments[: len(seen.launched[1][1])] == seen.launched[1][1], "the same arguments as alone"


def _fused(lc: RoleSource, be: list[RoleSource]) -> FusedSource:
    made = fuse(lc, be, shapes(lc, be, H200)[0], facts=H200)
    assert isinstance(made, FusedSource), made
    return made


@pytest.mark.slow
def test_hosts_leave_shared_memory_and_differ() -> None:
    kernel = lc_kernel("bert_base/product-2048x768x3072")
    plain, roomy = hosts(kernel, H200, 4), hosts(kernel, H200, 4, shared_bytes=64 << 10)
    assert max(s.roles[0].shared_bytes for s in plain) > H200.shared_per_block - (64 << 10)
    assert all(s.roles[0].shared_bytes <= H200.shared_per_block - (64 << 10) for s in roomy) and len(roomy) == 4
    alike = hosts(kernel, H200, 6, alike=3)
    assert len({s.schedule.param("stages") for s in alike}) > 1 and len(alike) == 6
    assert hosts(kernel, H200, 4, shared_bytes=1 << 20) == [] == hosts(kernel, H200, 0)
    assert hosts(kernel, replace(H200, capability=80), 1) == [], "no wgmma before Hopper"


def test_what_cannot_be_a_host_is_told_by_name() -> None:
    kernel = lc_kernel("resnet50/conv3x3s2-512-14")
    clusters = lc_source(kernel, kernel.schedules[0])
    assert isinstance(clusters, RoleSource) and math.prod(clusters.roles[0].cluster) == 4, "its fastest kernel"
    other = replace(kernel.schedules[0], params=(("template", "none"),))
    assert isinstance(lc_source(kernel, other), Declined)


def test_what_is_drawn_is_normal_and_always_the_same() -> None:
    kernel = lc_kernel("bert_base/product-2048x3072x768")
    x, w, _ = kernel.inputs
    data = drawn(w, 7)
    assert data == drawn(w, 7) != drawn(w, 8) and len(data) == w.nbytes
    values = torch.frombuffer(bytearray(data), dtype=torch.float16).float()
    assert abs(float(values.std()) * math.sqrt(768) - 1) < 0.01 and abs(float(values.mean())) < 1e-3
    assert (x.scale, w.is_weight, x.is_weight) == (1.0, True, False)
    number = replace(x, type=replace(x.type, dtype=DType.I32))
    whole = torch.frombuffer(bytearray(drawn(number, 1)), dtype=torch.int32)
    assert int(whole.min()) == 0 and int(whole.max()) == 15 and whole.numel() == x.type.size


def test_the_file_is_read_back() -> None:
    text = FILE.read_text()
    assert to_json(from_json(text)) == text


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format":2,"gpu":"h200","kernels":[]}', '{"format":1,"gpu":"h200","kernels":[{"name":"x"}]}']
)
def test_a_file_that_is_none(text: str) -> None:
    with pytest.raises(ArtifactError, match="malformed file of latency-critical kernels"):
        from_json(text)


def test_a_name_twice_or_a_kernel_without_a_time_is_no_file() -> None:
    one = next(iter(recorded().values()))
    for bad in ([one, one], [replace(one, timed=())]):
        with pytest.raises(ArtifactError, match="a name twice"):
            from_json(to_json(bad))


def test_differences_are_told() -> None:
    one, two = list(recorded().values())[:2]
    assert difference([one, two], [one, two]) == ""
    assert "became" in difference([one], [two])
    assert difference([one], [replace(one, times=7)]).startswith(one.name)


def test_the_command_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lc.json"
    file.write_text(FILE.read_text())
    monkeypatch.setattr(latency_critical, "FILE", file)
    one = [r for r in recorded().values() if r.name.startswith("vgg16/")]
    monkeypatch.setattr(latency_critical, "costliest", lambda network: one)
    with pytest.raises(SystemExit) as ended:
        main(["--check", "vgg16"])
    assert ended.value.code == 0
    other: list[Recorded] = [replace(r, times=r.times + 1) for r in one]
    monkeypatch.setattr(latency_critical, "costliest", lambda network: other)
    with pytest.raises(SystemExit) as ended:
        main(["--check", "vgg16"])
    assert ended.value.code == 1 and "is another problem" in capsys.readouterr().out
    assert file.read_text() == FILE.read_text(), "checking writes nothing"
    with pytest.raises(SystemExit):
        main(["vgg16"])
    assert [r["times"] for r in json.loads(file.read_text())["kernels"][:2]] == [r.times for r in other]
    with pytest.raises(SystemExit) as ended:
        main(["nothing"])
    assert ended.value.code == 2


def test_two_products_have_no_name() -> None:
    graph = lc_kernel(lc_names()[0]).problem.graph
    assert linear_node(graph).prim.value == "conv"
    with pytest.raises(ValueError, match="0 products and convolutions"):
        shape_name(replace(graph, nodes=graph.nodes[:1], outputs=(0,)))
