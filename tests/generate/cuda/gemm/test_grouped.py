"""Products of different sizes in one launch, and a product stored as several results: exact in the emulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from tests.generate.cuda.products import BF16, F16, F32, LAST, ROW
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import asked, few

from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import ToolchainError
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.grouped import kernel as grouped
from weft.generate.cuda.gemm.grouped import match as grouped_match
from weft.generate.cuda.gemm.grouped import tma as grouped_tma
from weft.generate.cuda.gemm.grouped.kernel import GroupedConfig
from weft.generate.cuda.predict import predicted_us
from weft.generate.cuda.role import beside
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import MOST_PARAMETER_BYTES, CudaSource, Launch, Pointer, TensorMap

Make = Callable[["Maker"], NodeId]


class Maker:
    """A problem as it is made: inputs, weights, and their formats."""

    def __init__(self, dtype: DType) -> None:
        self.b = GraphBuilder()
        self.dtype = dtype
        self.formats: list[Format] = []

    def input(self, *shape: int, weight: bool = False, dtype: DType | None = None) -> NodeId:
        self.formats.append(LAST if len(shape) == 4 and not weight else ROW)
        return self.b.input(TensorType(dtype or self.dtype, shape), is_weight=weight)

    def linear(
        self,
        m: int,
        n: int,
        k: int,
        *,
        weight: bool = True,
        turned: bool = False,
        end: str = "bias relu",
        x: NodeId | None = None,
        dtype: DType | None = None,
    ) -> NodeId:
        """x @ w with what `end` names: bias, relu, residual."""
        b = self.b
        x = self.input(m, k, dtype=dtype) if x is None else x
        w = self.input(n, k, weight=weight, dtype=dtype) if turned else self.input(k, n, weight=weight, dtype=dtype)
        y = b.add(Prim.MATMUL, x, b.transpose(w, (1, 0)) if turned else w)
        if "bias" in end:
            y = b.apply(Prim.ADD, y, self.input(n, weight=True, dtype=dtype))
        if "residual" in end:
            y = b.apply(Prim.ADD, y, self.input(m, n, dtype=dtype))
        return b.apply(Prim.MAX, y, 0.0) if "relu" in end else y

    def conv(self, n: int, c: int, h: int, w: int, oc: int, kh: int, kw: int) -> NodeId:
        """relu(conv(x) + bias) with the size of x."""
        b = self.b
        pads = (kh // 2, kw // 2)
        x = self.input(n, c, h, w)
        attrs = a.ConvAttrs((1, 1), pads, pads, (1, 1), 1)
        y = b.add(Prim.CONV, x, self.input(oc, c, kh, kw, weight=True), attrs=attrs)
        return b.apply(Prim.MAX, b.apply(Prim.ADD, y, b.reshape(self.input(oc, weight=True), (oc, 1, 1))), 0.0)

    def problem(self, outputs: Sequence[NodeId]) -> Problem:
        graph = self.b.build(outputs)
        outs = tuple(LAST if graph.type_of(o).rank == 4 and LAST in self.formats else ROW for o in outputs)
        return Problem(graph, f"{graph} {self.formats}", tuple(self.formats), outs)


def group(*makes: Make, dtype: DType = F16) -> Problem:
    maker = Maker(dtype)
    return maker.problem([make(maker) for make in makes])


def qkv(
    batch: int,
    rows: int,
    heads: int,
    size: int,
    k: int,
    *,
    way: str,
    dtype: DType = F16,
    turn_k: bool = False,
    beside: bool = False,
) -> Problem:
    """Heads of attention [batch, heads, rows, size] of x @ w + b: q, k (perhaps turned) and v.

    `beside`: a value of q's layout, one per head and one per column of a head are added to q.

    `way`: `three` products of one operand; `slices` of one and heads of these; `stacked`, as a reshape to five
    dimensions and a permutation make them.
    """
    maker = Maker(dtype)
    b, n = maker.b, heads * size

    def parted(y: NodeId) -> NodeId:
        return b.transpose(b.reshape(y, (batch, rows, heads, size)), (0, 2, 1, 3))

    if way == "three":
        x = maker.input(batch * rows, k)
        found = [parted(maker.linear(batch * rows, n, k, end="bias", x=x)) for _ in range(3)]
    else:
        y = maker.linear(batch * rows, 3 * n, k, end="bias", turned=True)
        if way == "slices":
            found = [parted(b.slice(y, (0, i * n), (batch * rows, n), (1, 1))) for i in range(3)]
        else:
            y = b.transpose(b.reshape(y, (batch, rows, 3, heads, size)), (2, 0, 3, 1, 4))
            whole = (1, batch, heads, rows, size)
            parts = [b.slice(y, (i, 0, 0, 0, 0), whole, (1,) * 5) for i in range(3)]
            found = [b.reshape(part, whole[1:]) for part in parts]
    if beside:
        for shape in ((batch, heads, rows, size), (heads, 1, 1), (size,)):
            found[0] = b.apply(Prim.ADD, found[0], maker.input(*shape, weight=len(shape) < 4))
        maker.formats[-3] = ROW
    if turn_k:
        found[1] = b.transpose(found[1], (0, 1, 3, 2))
    graph = b.build(found)
    return Problem(graph, f"{graph} {way}", tuple(maker.formats), (ROW,) * 3)


ONE = GroupedConfig(32, 32, 32, 16, 16, 1, 3, (1, 1), 1)
CASES: dict[str, tuple[Problem, GroupedConfig]] = {
    "rows of two lengths": (
        group(lambda m: m.linear(70, 40, 64), lambda m: m.linear(33, 72, 40, end="bias")),
        ONE,
    ),
    "odd sizes, one row": (
        group(
            lambda m: m.linear(1, 19, 33, end="residual"),
            lambda m: m.linear(35, 1, 17, turned=True),
            lambda m: m.linear(5, 70, 3, weight=False, end=""),
        ),
        GroupedConfig(16, 32, 32, 16, 16, 1, 3, (1, 1, 1), 1),
    ),
    "equal texts": (
        group(*(lambda m: m.linear(40, 24, 48) for _ in range(3)), lambda m: m.linear(17, 24, 48)),
        GroupedConfig(32, 32, 32, 16, 32, 2, 3, (1, 1, 1, 1), 1),
    ),
    "sums through memory": (
        group(*(lambda m: m.linear(20, 24, 256) for _ in range(2)), lambda m: m.linear(40, 33, 136)),
        GroupedConfig(32, 32, 32, 16, 16, 1, 3, (3, 3, 2), 1),
    ),
    "clusters, and blocks that share no sum": (
        group(lambda m: m.linear(20, 24, 256), lambda m: m.linear(40, 36, 136), lambda m: m.linear(70, 40, 24)),
        GroupedConfig(32, 16, 32, 16, 16, 1, 3, (4, 4, 1), 4),
    ),
    "as many tiles as blocks of a cluster": (
        group(lambda m: m.linear(40, 48, 64), lambda m: m.linear(20, 48, 40), lambda m: m.linear(40, 24, 64)),
        GroupedConfig(32, 32, 32, 16, 16, 1, 3, (2, 2, 2), 2),
    ),
    "convolutions": (
        group(
            lambda m: m.conv(1, 16, 7, 6, 24, 5, 5),
            lambda m: m.conv(1, 24, 7, 6, 40, 3, 3),
            lambda m: m.conv(2, 8, 9, 5, 16, 1, 1),
            lambda m: m.conv(1, 16, 7, 6, 24, 1, 7),
        ),
        GroupedConfig(32, 32, 32, 16, 16, 1, 3, (2, 1, 1, 1), 1),
    ),
    "experts": (
        group(*(lambda m, rows=rows: m.linear(rows, 48, 32, end="bias relu") for rows in (1, 3, 64, 17, 128))),
        GroupedConfig(64, 32, 32, 32, 16, 1, 3, (1,) * 5, 1),
    ),
    "deep": (
        group(lambda m: m.linear(70, 40, 1024), lambda m: m.linear(20, 16, 64), lambda m: m.linear(33, 72, 520)),
        GroupedConfig(32, 32, 64, 16, 16, 1, 3, (4, 1, 4), 4),
    ),
    "bf16": (group(lambda m: m.linear(33, 40, 72), lambda m: m.linear(64, 16, 24), dtype=BF16), ONE),
    "f32": (
        group(lambda m: m.linear(33, 40, 72), lambda m: m.linear(17, 20, 36, turned=True), dtype=F32),
        GroupedConfig(32, 32, 16, 16, 16, 1, 3, (2, 1), 2),
    ),
    "tf32": (
        group(lambda m: m.linear(33, 40, 72), lambda m: m.linear(17, 20, 36, turned=True), dtype=F32),
        GroupedConfig(32, 32, 16, 16, 16, 1, 3, (1, 1), 1),
    ),
    "warpgroups": (
        group(lambda m: m.linear(70, 40, 264, turned=True), lambda m: m.linear(130, 33, 64, turned=True)),
        GroupedConfig(64, 32, 64, 64, 32, 1, 4, (1, 1), 1, True),
    ),
    "q, k and v of one operand": (
        qkv(2, 20, 3, 16, 40, way="three"),
        GroupedConfig(32, 32, 32, 16, 16, 1, 3, (1,) * 3, 1),
    ),
    "slices as heads": (qkv(2, 20, 3, 16, 40, way="slices"), GroupedConfig(32, 32, 32, 16, 16, 1, 3, (1,) * 3, 1)),
    "slices as heads, operands beside": (
        qkv(2, 20, 3, 16, 40, way="slices", beside=True),
        GroupedConfig(32, 32, 32, 16, 16, 1, 3, (1,) * 3, 1),
    ),
    "slices as heads, tf32": (
        qkv(2, 20, 3, 16, 40, way="slices", dtype=F32, beside=True),
        GroupedConfig(32, 64, 32, 16, 32, 1, 3, (2, 1, 1), 2),
    ),
    "slices as heads, keys turned": (
        qkv(2, 24, 3, 8, 40, way="slices", turn_k=True),
        GroupedConfig(32, 32, 32, 16, 16, 1, 3, (1,) * 3, 1),
    ),
    "stacked heads": (qkv(2, 21, 3, 16, 40, way="stacked"), GroupedConfig(32, 64, 32, 16, 32, 1, 3, (1,) * 3, 1)),
    "stacked heads, keys turned, bf16": (
        qkv(1, 24, 2, 8, 33, way="stacked", turn_k=True, dtype=BF16),
        GroupedConfig(32, 32, 32, 16, 16, 1, 3, (1, 1, 1), 1),
    ),
}


def source_of(name: str) -> CudaSource:
    problem, shape = CASES[name]
    source = templates.emit(problem, shape.schedule(tensor=name != "f32"))
    assert isinstance(source, CudaSource), (name, source)
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: source_of(name) for name in CASES}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources))


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", few(CASES, 4))
def test_sums_of_integers_are_exact(name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, CASES[name][0], sources[name], most=1, defer=defer)


GIVEN = group(
    *(lambda m, i=i: m.linear(40 + 7 * i, 24, 72 + 8 * (i % 3), weight=False, turned=True, end="residual")
      for i in range(grouped_match.MOST_MEMBERS))
)  # fmt: skip
"""As many members as a group has, none with constants: tensor maps of both operands of each."""


@pytest.fixture(scope="module")
def given() -> CudaSource:
    found = grouped.matched(GIVEN, tf32=False)
    assert not isinstance(found, Declined), found.reason
    source = templates.emit(GIVEN, grouped_tma.shapes(found, H200)[0][1].schedule())
    assert isinstance(source, CudaSource), source
    return source


@pytest.mark.slow
def test_many_tensor_maps_are_one_kernels_arguments(given: CudaSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the 4 KB of CUDA 12.0; what no kernel takes is declined."""
    (launch,) = given.launches
    assert sum(isinstance(x, TensorMap) for x in launch.arguments) == 2 * grouped_match.MOST_MEMBERS
    assert 4096 < launch.parameter_bytes == 32 * 128 + 4 * 16 * 8 <= MOST_PARAMETER_BYTES
    compiled_well([given], "sm_90a", H200)
    assert_exact(Emulated([given]), GIVEN, given, most=1)
    monkeypatch.setattr(beside, "MOST_PARAMETER_BYTES", launch.parameter_bytes - 1)
    refused = templates.emit(GIVEN, given.schedule)
    assert isinstance(refused, Declined)
    assert f"{launch.parameter_bytes} bytes of arguments" in refused.reason


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_limit_of_arguments_is_the_compilers(arch: str) -> None:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    (most, rest) = divmod(MOST_PARAMETER_BYTES, 8)
    names = ", ".join(f"void* a{i}" for i in range(most))
    assert rest == 4
    nvrtc.compile(f'extern "C" __global__ void k({names}, int last) {{ *(int*)a0 = last; }}', arch=arch)
    with pytest.raises(ToolchainError) as refused:
        nvrtc.compile(f'extern "C" __global__ void k({names}, void* last) {{ *(void**)a0 = last; }}', arch=arch)
    assert f"max {MOST_PARAMETER_BYTES} bytes" in str(refused.value.log)
    assert Launch("k", (1, 1, 1), (1, 1, 1), (Pointer("in"),) * (most + 1)).parameter_bytes > MOST_PARAMETER_BYTES


COPIED = (
    "rows of two lengths", "equal texts", "convolutions", "experts", "bf16", "warpgroups", "q, k and v of one operand",
    "slices as heads", "slices as heads, operands beside", "slices as heads, tf32", "stacked heads", "tf32", "deep",
)  # fmt: skip
"""Cases for TMA."""


def clustered(every: Sequence[grouped_match.Member]) -> list[tuple[float, grouped_tma.GroupedTmaConfig]]:
    """A shape in which some share their sums in a cluster."""
    found = grouped_tma.shapes(every, replace(H200, tf32=True))
    return [(us, s) for us, s in found if max(one.split for one in s.members) > 1][:1]


@pytest.fixture(scope="module")
def copied() -> dict[tuple[str, int], CudaSource]:
    found = {}
    for name in COPIED:
        problem = CASES[name][0]
        every = grouped.matched(problem, tf32=True)
        assert not isinstance(every, Declined)
        shapes = grouped_tma.shapes(every, replace(H200, tf32=True, sms=5))
        assert shapes, name
        for number, (_, shape) in enumerate([*shapes[:2], *clustered(every)]):
            assert grouped_tma.GroupedTmaConfig.of(shape.schedule()) == shape
            source = templates.emit(problem, shape.schedule())
            assert isinstance(source, CudaSource), (name, source)
            found[name, number] = source
    return found


@pytest.fixture(scope="module")
def emulated(request: pytest.FixtureRequest, copied: dict[tuple[str, int], CudaSource]) -> Emulated:
    every = {name: [source for (case, _), source in copied.items() if case == name] for name in COPIED}
    return Emulated([source for sources in asked(request, every) for source in sources])


@pytest.mark.parametrize("defer", [0, 1, 2], ids=["copies at once", "copies late", "products late"])
@pytest.mark.parametrize("name", few(COPIED, 2))
def test_sums_by_the_copy_engine_are_exact(
    name: str, defer: int, copied: dict[tuple[str, int], CudaSource], emulated: Emulated
) -> None:
    assert name != "deep" or any(s.launches[0].cluster[0] > 1 for (case, _), s in copied.items() if case == name)
    for (case, _), source in copied.items():
        if case == name:
            assert_exact(emulated, CASES[name][0], source, most=1, defer=defer)


def test_equal_products_have_one_body_and_one_buffer_for_equal_weights() -> None:
    problem = CASES["equal texts"][0]
    source = source_of("equal texts")
    assert source.text.count("W_FN void member(") == 2, "three products of one text, and another"
    assert len(source.packed_bytes) == 4
    maker = Maker(F16)
    w = maker.input(48, 24, weight=True)
    xs = [maker.input(40, 48) for _ in range(2)]
    shared = maker.problem([maker.b.add(Prim.MATMUL, x, w) for x in xs])
    one = templates.emit(shared, replace(ONE, splits=(1, 1)).schedule())
    assert isinstance(one, CudaSource)
    assert one.text.count("W_FN void member(") == 1
    assert len(one.packed_bytes) == len(one.pack) == 1
    assert one.replaces_weights == (0,)
    assert len(problem.graph.inputs) == 12
    assert source.replaces_weights == (1, 4, 7, 10)


def test_blocks_of_members_lie_behind_each_other_longest_sums_first() -> None:
    source = source_of("clusters, and blocks that share no sum")
    (launch,) = source.launches
    assert launch.cluster == (4, 1, 1)
    counts = (1 * 2 * 4, 2 * 3 * 4, 3 * 3)
    assert launch.grid == (-(-sum(counts) // 4) * 4, 1, 1)
    first, second, third = (source.text.index(f"block < {n}u") for n in (8, 32, 41))
    assert first < second < third
    memory = source_of("sums through memory")
    assert {p.kind for p in memory.launches[0].arguments if isinstance(p, Pointer)} >= {"work", "state"}
    assert memory.state_bytes == 3 * 256


def network(name: str) -> Problem:
    """Groups as networks have them."""
    if name == "inception":
        return group(
            lambda m: m.conv(1, 48, 35, 35, 64, 5, 5),
            lambda m: m.conv(1, 64, 35, 35, 96, 3, 3),
            lambda m: m.conv(1, 192, 35, 35, 32, 1, 1),
        )
    if name == "segformer":
        sizes = ((16384, 32), (4096, 64), (1024, 160), (256, 256))
        return group(*(lambda m, r=r, k=k: m.linear(r, 256, k, end="bias") for r, k in sizes))
    if name == "heads":
        return qkv(1, 128, 12, 64, 768, way="stacked")
    rows = (3, 17, 40, 64, 100, 128, 260, 412)
    return group(*(lambda m, r=r: m.linear(r, 1024, 512, end="bias relu") for r in rows))


@pytest.mark.parametrize("name", ["inception", "segformer", "heads", "experts"])
@pytest.mark.parametrize("arch", few(["sm_80", "sm_90a"], 1))
def test_groups_of_networks_compile_without_spills(name: str, arch: str) -> None:
    facts = H200 if arch == "sm_90a" else A100
    problem = network(name)
    found = grouped.matched(problem, tf32=False)
    assert not isinstance(found, Declined), found.reason
    for cycles, shape in grouped.shapes(found, facts)[:1]:
        source = templates.emit(problem, shape.schedule())
        assert isinstance(source, CudaSource)
        compiled_well([source], arch, facts)
        assert predicted_us(problem, shape.schedule(), facts) == pytest.approx(cycles / facts.clock_ghz / 1e3)


@pytest.mark.parametrize("name", few(["inception", "segformer", "heads", "experts"], 1))
def test_groups_by_the_copy_engine_compile_without_spills(name: str) -> None:
    problem = network(name)
    found = grouped.matched(problem, tf32=False)
    assert not isinstance(found, Declined), found.reason
    ranked = grouped_tma.shapes(found, H200)
    assert ranked
    for cycles, shape in ranked[:1]:
        source = templates.emit(problem, shape.schedule())
        assert isinstance(source, CudaSource)
        compiled_well([source], "sm_90a", H200)
        us = predicted_us(problem, shape.schedule(), H200)
        assert us == pytest.approx(cycles / H200.clock_ghz / 1e3, rel=0.2)


@pytest.mark.parametrize("name", ["inception", "segformer", "heads", "experts"])
def test_small_products_are_offered_together(name: str) -> None:
    found = templates.schedules(network(name), H200)
    assert not isinstance(found, Declined), found.reason
    assert {s.param("template") for s in found} == {"grouped", "grouped_tma"}


def test_what_fills_the_gpu_alone_is_declined() -> None:
    problem = group(*(lambda m: m.linear(8192, 4096, 4096, end="") for _ in range(2)))
    refused = templates.schedules(problem, H200)
    assert isinstance(refused, Declined)
    assert "one launch is modelled to take" in refused.reason


def dependent() -> Problem:
    maker = Maker(F16)
    first = maker.linear(40, 32, 24)
    return maker.problem([first, maker.linear(40, 16, 32, x=first)])


def meeting() -> Problem:
    maker = Maker(F16)
    one, two = maker.linear(40, 32, 24), maker.linear(40, 32, 48)
    return maker.problem([one, maker.b.apply(Prim.ADD, one, two)])


def across_rows() -> Problem:
    maker = Maker(F16)
    y = maker.linear(40, 32, 24)
    return maker.problem([maker.b.slice(y, (i * 20, 0), (20, 32), (1, 1)) for i in range(2)])


def every_other() -> Problem:
    maker = Maker(F16)
    y = maker.linear(40, 32, 24)
    return maker.problem([maker.b.slice(y, (0, i), (40, 16), (1, 2)) for i in range(2)])


def across_heads() -> Problem:
    """Slices of a reshape that are no stretch of columns: every head's first half."""
    maker = Maker(F16)
    y = maker.b.reshape(maker.linear(40, 32, 24), (40, 4, 8))
    return maker.problem([maker.b.slice(y, (0, 0, i), (40, 4, 4), (1, 1, 1)) for i in (0, 4)])


def no_product() -> Problem:
    maker = Maker(F16)
    x = maker.input(40, 24)
    return maker.problem([*(maker.linear(40, 32, 24, x=x) for _ in range(2)), maker.b.apply(Prim.EXP, x)])


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (dependent(), "depend on each other"),
        (meeting(), "meet in a result"),
        (across_rows(), "not whole columns"),
        (every_other(), "in steps"),
        (across_heads(), "no stretch"),
        (no_product(), "depends on no product"),
        (group(lambda m: m.linear(0, 32, 24), lambda m: m.linear(40, 32, 24)), "no elements"),
        (group(lambda m: m.linear(40, 32, 24), lambda m: m.linear(40, 0, 24)), "no elements"),
        (group(lambda m: m.linear(40, 32, 24), lambda m: m.linear(40, 32, 24, dtype=BF16)), "bf16 and f16"),
        (group(lambda m: m.linear(40, 32, 24), lambda m: m.linear(40, 32, 24, dtype=F32)), "f16 and f32"),
        (group(*(lambda m: m.linear(40, 32, 24) for _ in range(17))), "17 products"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, part: str) -> None:
    refused = grouped_match.members(problem)
    assert isinstance(refused, Declined)
    assert part in refused.reason


@pytest.mark.parametrize("make", [meeting, across_rows, no_product])
def test_what_meets_or_is_no_columns_has_no_kernel(make: Callable[[], Problem]) -> None:
    assert isinstance(templates.schedules(make(), H200), Declined)


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        (replace(ONE, splits=(1, 1, 1)), "3 splits for 2 products"),
        (replace(ONE, splits=(2, 1), cluster=4), "other CTAs than those of one cluster"),
        (replace(ONE, group=True), "wgmma"),
    ],
)
def test_shapes_that_do_not_fit_are_declined(shape: GroupedConfig, part: str) -> None:
    problem = group(lambda m: m.linear(33, 40, 72), lambda m: m.linear(17, 20, 36, turned=True), dtype=F32)
    refused = templates.emit(problem, shape.schedule())
    assert isinstance(refused, Declined)
    assert part in refused.reason


def test_a_reshape_is_undone_for_stretches_alone() -> None:
    box = grouped_match.Box
    undo = grouped_match._before_reshape
    assert undo((6, 24), (2, 3, 2, 12), box((0, 0, 1, 0), (2, 3, 1, 12))) == box((0, 12), (6, 12))
    assert undo((2, 3, 24), (6, 2, 1, 12), box((0, 1, 0, 4), (6, 1, 1, 8))) == box((0, 0, 16), (2, 3, 8))
    assert undo((1, 4, 1), (4, 1, 1), box((2, 0, 0), (1, 1, 1))) == box((0, 2, 0), (1, 1, 1))
    with pytest.raises(grouped_match._RefusedError, match="no stretch"):
        undo((6, 24), (6, 2, 12), box((0, 0, 0), (6, 2, 6)))
    with pytest.raises(grouped_match._RefusedError, match="no stretch"):
        undo((2, 3, 4), (6, 4), box((2, 0), (2, 4)))
