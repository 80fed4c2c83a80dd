"""8-bit floats: exact values, rounding, bits, and what the IR does with them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from weft.errors import ModelError
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.passes import clean_up
from weft.ir.passes.compose_casts import holds_every_value
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.text import parse_graph, print_graph
from weft.ir.types import DType, TensorType, f8_values, from_bits, round_f8, to_bits

E4, E5, F32 = DType.F8E4M3, DType.F8E5M2, DType.F32
PACKAGE = {E4: ml_dtypes.float8_e4m3fn, E5: ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("dtype", [E4, E5])
def test_bytes_are_those_of_the_standard(dtype: DType) -> None:
    theirs = np.arange(256, dtype=np.uint8).view(PACKAGE[dtype]).astype(np.float32)
    np.testing.assert_array_equal(f8_values(dtype), theirs)
    known = ~np.isnan(theirs)
    np.testing.assert_array_equal(to_bits(theirs, dtype)[known], np.arange(256, dtype=np.uint8)[known])
    assert set(to_bits(theirs, dtype)[~known] & 0x7F) == {0x7F}
    np.testing.assert_array_equal(from_bits(np.arange(256, dtype=np.uint8), dtype), theirs)


@pytest.mark.parametrize("dtype", [E4, E5])
def test_rounding_is_to_the_nearest_ties_to_even(dtype: DType) -> None:
    values = f8_values(dtype)
    finite = np.sort(values[np.isfinite(values)])
    x = np.random.default_rng(0).uniform(finite[0], finite[-1], 20_000) ** 3 / finite[-1] ** 2
    x = np.concatenate([x, finite, (finite[1:] + finite[:-1]) / 2])
    np.testing.assert_array_equal(round_f8(x, dtype), x.astype(PACKAGE[dtype]).astype(np.float32))
    np.testing.assert_array_equal(round_f8(finite, dtype), finite)
    # one rounding, not first to f32 and then to 8 bits
    tie = 1 + 2.0 ** -(4 if dtype is E4 else 3)
    assert round_f8(np.array([tie + 2.0**-40]), dtype)[0] > 1


def test_beyond_the_greatest() -> None:
    x = np.array([448, 464, 465, 1e9, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(round_f8(x, E4), [448, 448, 448, 448, 448, -448, np.nan])
    y = np.array([57344, 61439, 61440, -1e9, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(round_f8(y, E5), [57344, 57344, np.inf, -np.inf, np.inf, np.nan])


def casts(dtype: DType) -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(F32, (5,)))
    c = b.constant(round_f8(np.array([0.1, -448.0, 3e-3, 1.0, np.nan], np.float32), dtype), dtype)
    kept = b.cast(b.cast(x, dtype), F32)
    return b.build([b.add(Prim.ADD, kept, b.cast(c, F32)), b.cast(c, DType.F16), c])


@pytest.mark.parametrize("dtype", [E4, E5])
def test_text_and_meaning(dtype: DType) -> None:
    graph = casts(dtype)
    text = print_graph(graph)
    assert f": 5x{dtype.value}" in text
    again = parse_graph(text)
    assert print_graph(again) == text
    x = np.array([0.3, 100.0, -7.7, 1e6, 0.0], np.float32)
    for found, wanted in zip(evaluate(again, [x]), evaluate(graph, [x]), strict=True):
        np.testing.assert_array_equal(found, wanted)
    total = round_f8(x, dtype) + np.asarray(graph.constants[next(iter(graph.constants))])
    np.testing.assert_array_equal(evaluate(graph, [x])[0], total)


@pytest.mark.parametrize("dtype", [E4, E5])
def test_casts_that_round_stay(dtype: DType) -> None:
    graph = clean_up(casts(dtype), verify=True).graph
    assert any(n.prim is Prim.CAST and n.type.dtype is dtype for n in graph.nodes)
    for wide in (DType.F16, DType.BF16, F32, DType.F64):
        values = f8_values(dtype)
        assert holds_every_value(wide, dtype)
        np.testing.assert_array_equal(evaluate(_widened(dtype, wide), [values])[0].astype(np.float32), values)
    assert not holds_every_value(dtype, DType.I8)
    assert not holds_every_value(E4, E5)
    assert not holds_every_value(E5, E4)


def _widened(dtype: DType, wide: DType) -> Graph:
    b = GraphBuilder()
    return b.build([b.cast(b.input(TensorType(dtype, (256,))), wide)])


def test_bytes_in_memory_and_the_type_of_sums() -> None:
    for dtype in (E4, E5):
        assert (dtype.itemsize, dtype.accumulator, dtype.is_float, dtype.is_emulated) == (1, F32, True, True)
        assert TensorType(dtype, (3, 5)).nbytes == 15


def test_unknown_types_are_refused() -> None:
    with pytest.raises(ModelError, match="unknown element type"):
        parse_graph('graph 1\ninputs %0 "x"\n%0 = input() index=0 : 4xf8e4m3fnuz\noutputs %0')
