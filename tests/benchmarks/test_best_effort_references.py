"""References of best-effort kernels against facts that do not stand on them."""

from __future__ import annotations

import itertools
import struct
import zlib

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
import scipy.spatial
from benchmarks.best_effort import references as r
from benchmarks.best_effort.jobs import load


def chance(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_mriq_is_a_discrete_fourier_transform_on_the_grid() -> None:
    n = 8
    grid = np.arange(n, dtype=np.float64)
    x, y, z = (g.reshape(-1) for g in np.meshgrid(grid, grid, grid, indexing="ij"))
    weights = chance().standard_normal(n**3)
    samples = np.stack([x / n, y / n, z / n, weights], axis=1)
    got = r.mriq({"x": x, "y": y, "z": z, "samples": samples}, np.arange(n**3))
    want = np.fft.ifftn(weights.reshape(n, n, n)).reshape(-1) * n**3
    np.testing.assert_allclose(got["q_real"] + 1j * got["q_imag"], want, atol=1e-10)


def test_sgemm_by_einsum() -> None:
    a, b, c = (chance(k).standard_normal(s) for k, s in enumerate([(5, 7), (7, 3), (5, 3)]))
    got = r.sgemm({"a": a, "b": b, "c": c, "alpha": 2.0, "beta": -1.0}, np.array([1, 4]))["d"]
    np.testing.assert_allclose(got, (2 * np.einsum("ik,kj->ij", a, b) - c)[[1, 4]], rtol=1e-12)


def test_stencil_keeps_what_is_linear_and_its_faces() -> None:
    """A linear function is a fixed point where centre + 6 side = 1; a single one spreads to its neighbours alone."""
    z, y, x = np.meshgrid(*map(np.arange, (5, 6, 7)), indexing="ij")
    linear = 2.0 * x - 3.0 * y + 0.5 * z
    told = {"in": linear, "centre": 0.25, "side": 0.125}
    np.testing.assert_allclose(r.stencil(told, np.arange(5))["out"], linear, atol=1e-12)
    one = np.zeros((5, 6, 7))
    one[2, 2, 3] = 1.0
    out = r.stencil({**told, "in": one}, np.arange(5))["out"]
    assert out[2, 2, 3] == 0.25 and out[1, 2, 3] == out[2, 1, 3] == out[2, 2, 4] == 0.125 and out.sum() == 1.0


def test_histo_counts() -> None:
    values = chance().integers(0, 50, 999, np.uint16)
    got = r.histo({"values": values, "counts": np.zeros(64)}, np.arange(64))["counts"]
    assert got.sum() == 999 and all(got[b] == np.count_nonzero(values == b) for b in range(64))


def test_cp_is_coulombs_law() -> None:
    """One charge, at a distance of 5 (3, 0, 4); and the field outside is harmonic: its discrete Laplacian vanishes."""
    one = {"atoms": np.array([[3.0, 0.0, 4.0, 2.0]]), "spacing": 1.0, "height": 0.0, "potential": np.empty((1, 1))}
    assert r.cp(one, np.array([0]))["potential"][0, 0] == 2.0 / 5.0
    atoms, h = chance().random((9, 4)), 1e-3
    planes = [
        r.cp({"atoms": atoms, "spacing": h, "height": -0.5 + k * h, "potential": np.empty((3, 3))}, np.arange(3))
        for k in (-1, 0, 1)
    ]
    below, here, above = (p["potential"] for p in planes)
    beside = here[1, 0] + here[1, 2] + here[0, 1] + here[2, 1] + below[1, 1] + above[1, 1]
    assert abs(beside - 6 * here[1, 1]) / h**2 < 1e-3 * here[1, 1] / 0.5**2


def test_lbm_conserves_mass_and_momentum_and_rests_in_equilibrium() -> None:
    nz, ny, nx = 4, 5, 6
    f = chance().random((19, nz, ny, nx)) * 0.04 + 0.03
    none = np.full((nz, ny, nx), 255, np.uint8)
    told = {"a": f, "cell": none, "solid_below": 5, "omega": 1.6}
    after = r.lbm(told, np.arange(nz))
    for result in ("b", "a"):
        assert np.isclose(after[result].sum(), f.sum(), rtol=1e-12)
        momentum = [np.einsum("id,izyx->d", r.LATTICE, x) for x in (after[result], f)]
        np.testing.assert_allclose(momentum[0], momentum[1], rtol=1e-10, atol=1e-10)
    some_solid = {**told, "cell": chance(1).integers(0, 256, (nz, ny, nx)).astype(np.uint8), "solid_below": 64}
    walled = r.lbm(some_solid, np.arange(nz))
    assert np.isclose(walled["a"].sum(), f.sum(), rtol=1e-12), "walls keep mass"
    rest = np.broadcast_to(r.LATTICE_WEIGHTS[:, None, None, None], f.shape)
    np.testing.assert_allclose(r.lbm({**told, "a": rest}, np.arange(nz))["a"], rest, rtol=1e-13)


def test_lbm_has_the_moments_of_its_lattice() -> None:
    """Weights sum to one, first moments vanish, second ones are a third: the speed of sound squared."""
    w, e = r.LATTICE_WEIGHTS, r.LATTICE
    np.testing.assert_allclose(w.sum(), 1.0)
    np.testing.assert_allclose(w @ e, 0.0, atol=1e-15)
    np.testing.assert_allclose(np.einsum("i,ia,ib->ab", w, e, e), np.eye(3) / 3, atol=1e-15)


def test_fft_is_numpys() -> None:
    x = chance().standard_normal((3, 64, 2))
    told = {"in": x, "sign": -1.0}
    got = r.fft(told, np.arange(3))["out"]
    want = np.fft.fft(x[..., 0] + 1j * x[..., 1])
    np.testing.assert_allclose(got[..., 0] + 1j * got[..., 1], want, atol=1e-11)
    back = r.fft({"in": got, "sign": 1.0}, np.array([1]))["out"] / 64
    np.testing.assert_allclose(back[0], x[1], atol=1e-12)


def test_mri_fhd_is_the_adjoint_of_a_fourier_transform() -> None:
    """<F x, d> = <x, F^H d> with F_kv = phi_k exp(-2 pi i k.v)."""
    position, k_space = chance(0).standard_normal((11, 4)), chance(1).standard_normal((7, 4))
    phi, data, x = (chance(k).standard_normal((n, 2)) @ [1, 1j] for k, n in ((2, 7), (3, 7), (4, 11)))
    forward = (phi[:, None] * np.exp(-2j * np.pi * k_space[:, :3] @ position[:, :3].T)) @ x
    pairs = {name: np.stack([c.real, c.imag], axis=-1) for name, c in (("phi", phi), ("data", data))}
    image = r.mri_fhd({"position": position, "k_space": k_space, **pairs}, np.arange(11))["image"] @ [1, 1j]
    np.testing.assert_allclose(np.vdot(forward, data), np.vdot(x, image), rtol=1e-12)


def test_cutcp_sees_a_charge_within_the_cutoff_alone() -> None:
    atoms = np.zeros((1, 1, 3, 1, 4))
    atoms[0, 0, 1, 0] = (0.5, 0.5, 0.5, 2.0)  # at (1.5, 0.5, 0.5)
    out = r.cutcp({"atoms": atoms, "cutoff": 0.75}, np.arange(8))["potential"]
    z, y, x = np.meshgrid(*((np.arange(n) + 0.5) / 8 for n in (8, 8, 24)), indexing="ij")
    distance = np.sqrt((x - 1.5) ** 2 + (y - 0.5) ** 2 + (z - 0.5) ** 2)
    assert ((out > 0) == (distance < 0.75)).all() and (out == 0).any()
    np.testing.assert_allclose(
        out[distance < 0.75], (2 / distance * (1 - (distance / 0.75) ** 2) ** 2)[distance < 0.75]
    )


def test_tpacf_counts_every_pair_once_by_its_angle() -> None:
    points = {f"{c}_{a}": chance(k).standard_normal(40).astype(np.float32)
              for k, (c, a) in enumerate((c, a) for c in ("data", "random") for a in "xyz")}  # fmt: skip
    edges = np.radians([10.0, 30.0, 90.0, 120.0])
    limits = np.concatenate([np.cos(edges), [-2.0]]).astype(np.float32)
    counts = r.tpacf({**points, "limits": limits}, np.arange(3))["counts"]
    assert counts.sum(axis=1).tolist() == [40 * 39 // 2, 40 * 39 // 2, 40 * 40]
    data, random = (np.stack([points[f"{c}_{a}"] for a in "xyz"]).astype(np.float64) for c in ("data", "random"))
    unit = [p / np.linalg.norm(p, axis=0) for p in (data, random)]
    across = np.arccos(np.clip(unit[0].T @ unit[1], -1, 1))
    assert counts[2].tolist() == np.histogram(across, [0, *edges, np.pi])[0].tolist()
    within = np.arccos(np.clip(unit[0].T @ unit[0], -1, 1))[np.triu_indices(40, 1)]
    assert counts[0].tolist() == np.histogram(within, [0, *edges, np.pi])[0].tolist()


def test_sad_of_a_frame_moved_by_an_offset_vanishes_there() -> None:
    frame = chance().integers(0, 256, (48, 64), np.uint8)
    moved = np.roll(frame, (2, -1), axis=(0, 1))  # moved[y, x] = frame[y - 2, x + 1]
    told = {"current": moved, "reference": frame, "sums": np.empty((12, 16, 49))}
    out = r.sad(told, np.arange(12))["sums"].reshape(12, 16, 7, 7)
    assert (out[5, :, 3 - 2, 3 + 1] == 0).all(), "the macroblock at (16, 16) finds itself at (-2, +1)"
    by_hand = np.abs(moved[20:24, 24:28].astype(int) - frame[23:27, 22:26].astype(int)).sum()
    assert out[5, 6, 3 + 3, 3 - 2] == by_hand, "block 6 begins at (4, 8) of it"
    far = r.sad({**told, "sums": np.empty((12, 16, 121))}, np.array([0]))["sums"][0, 0, 0]
    assert far == np.abs(moved[:4, :4].astype(int) - frame[0, 0]).sum(), "five pixels beyond the corner is the corner"


def test_spmv_is_scipys() -> None:
    values, x = chance(0).standard_normal((5, 30)), chance(1).standard_normal(20)
    columns, lengths = chance(2).integers(0, 20, (5, 30)), chance(3).integers(0, 6, 30)
    entry = np.arange(5)[:, None] < lengths
    row = np.broadcast_to(np.arange(30), (5, 30))
    matrix = scipy.sparse.coo_matrix((values[entry], (row[entry], columns[entry])), shape=(30, 20)).tocsr()
    told = {"values": values, "columns": columns, "lengths": lengths, "x": x}
    np.testing.assert_allclose(r.spmv(told, np.arange(30))["y"], matrix @ x, rtol=1e-12, atol=1e-13)


def test_hotspot3d_keeps_heat_but_for_what_leaks_and_is_added() -> None:
    temperature, power = chance(0).random((4, 5, 6)) * 50 + 40, chance(1).random((4, 5, 6))
    told = {"temperature": temperature, "power": power, "along_x": 0.1, "along_y": 0.12, "along_z": 0.05}
    closed = {**told, "centre": 1 - 2 * 0.27, "heating": 0.0, "sink": 0.0}
    out = r.hotspot3d(closed, np.arange(4))["out"]
    assert np.isclose(out.sum(), temperature.sum(), rtol=1e-13) and out.std() < temperature.std()
    heated = r.hotspot3d({**closed, "heating": 0.3}, np.arange(4))["out"]
    np.testing.assert_allclose(heated - out, 0.3 * power, rtol=1e-9)
    even = {**told, "temperature": np.full((4, 5, 6), 45.0), "centre": 0.458, "heating": 0.0, "sink": 0.002 * 45.0}
    np.testing.assert_allclose(r.hotspot3d(even, np.arange(4))["out"], 45.0, rtol=1e-13)


def test_lavamd_is_the_gradient_of_its_energy() -> None:
    """Forces are minus the derivatives of energies, and opposite for two particles of one charge."""
    particles = chance().random((2, 3, 4))
    told = {"grid": (2, 1, 1), "a": 0.5, "particles": particles}
    out = r.lavamd(told, np.arange(2))["forces"]
    for axis in range(3):
        step = np.zeros(4)
        step[axis] = 1e-6
        energies = []
        for sign in (1, -1):
            moved = particles.copy()
            moved[0, 1] += sign * step
            energies.append(r.lavamd({**told, "particles": moved}, np.array([0]))["forces"][0, 1, 3])
        assert np.isclose(-(energies[0] - energies[1]) / 2e-6, out[0, 1, axis], rtol=1e-6)
    alike = particles.copy()
    alike[..., 3] = 1.0
    forces = r.lavamd({**told, "particles": alike}, np.arange(2))["forces"]
    np.testing.assert_allclose(forces[..., :3].sum(axis=(0, 1)), 0.0, atol=1e-12)


def test_nn_finds_what_a_tree_finds() -> None:
    records = (chance().random((500, 2)) * 180 - 90).astype(np.float32)
    told = {"records": records, "x": 30.0, "y": -60.0}
    found = r.nn(told, np.arange(500))
    away, record = scipy.spatial.cKDTree(records.astype(np.float64)).query([30.0, -60.0])
    assert int(found["nearest"][0]) & 0xFFFFFFFF == record
    least = np.array(int(found["nearest"][0]) >> 32, np.uint32).view(np.float32)
    assert np.isclose(least, away, rtol=1e-6) and least == found["distances"].min()


def test_pathfinder_is_the_cheapest_path_of_a_graph() -> None:
    wall, start = chance(0).integers(0, 10, (6, 9), np.int32), chance(1).integers(0, 100, 9, np.int32)
    graph = scipy.sparse.lil_matrix((1 + 7 * 9, 1 + 7 * 9))  # a source, the start as a row, the wall's rows
    graph[0, 1:10] = start + 1000  # an edge of weight 0 is none
    for row, c, d in itertools.product(range(6), range(9), (-1, 0, 1)):
        if 0 <= c + d < 9:
            graph[1 + row * 9 + c, 1 + (row + 1) * 9 + c + d] = wall[row, c + d] + 1000
    length = scipy.sparse.csgraph.dijkstra(graph.tocsr(), indices=0)
    found = r.pathfinder({"wall": wall, "start": start}, np.arange(9))
    assert found["end"].tolist() == (length[1 + 6 * 9 :] - 7000).astype(int).tolist()
    assert found["middle"].tolist() == (length[1 + 3 * 9 : 1 + 4 * 9] - 4000).astype(int).tolist()


def test_crc32_is_zlibs() -> None:
    messages = chance().integers(0, 1 << 32, (9, 32), np.uint32)
    checks = r.crc32({"messages": messages}, np.array([0, 3, 8]))["checks"]
    assert checks.tolist() == [zlib.crc32(messages[k].astype("<u4").tobytes()) for k in (0, 3, 8)]


def test_aes_has_the_vectors_of_its_standard() -> None:
    """FIPS 197, appendices A.1 (the last round key), B and C.1."""
    key = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    assert r.aes_key_schedule(key)[10].tobytes().hex() == "d014f9a8c9ee2589e13f0cc8b6630ca6"
    for key_, text, cipher in (
        (key, "3243f6a8885a308d313198a2e0370734", "3925841d02dc09fbdc118597196a0b32"),
        (bytes(range(16)), "00112233445566778899aabbccddeeff", "69c4e0d86a7b0430d8cdb78070b4c55a"),
    ):
        block = np.frombuffer(bytes.fromhex(text), np.uint8)[None]
        assert r.aes_encrypted(block, r.aes_key_schedule(key_)).tobytes().hex() == cipher


def test_aes_in_counter_mode_has_the_vectors_of_its_standard() -> None:
    """NIST SP 800-38A, F.5.1, with what the job's files hold: its key and its first counter."""
    constants = load("aes").constants()
    schedule = r.aes_key_schedule(bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c"))
    assert constants["round_keys"].tolist() == list(struct.unpack(">44I", schedule.tobytes()))
    assert constants["counter"].tolist() == list(struct.unpack(">4I", bytes(range(0xF0, 0x100))))
    text = "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    blocks = np.frombuffer(bytes.fromhex(text), "<u4").reshape(2, 4)
    out = r.aes({"in": blocks, **constants}, np.arange(2))["out"]
    assert out.tobytes().hex() == "874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"


def test_black_scholes_keeps_parity_and_known_prices() -> None:
    s, x, t = (chance(k).random(100) * 50 + 1 for k in range(3))
    told = {"price": s, "strike": x, "years": t, "rate": 0.02, "volatility": 0.3}
    found = r.black_scholes(told, np.arange(100))
    np.testing.assert_allclose(found["call"] - found["put"], s - x * np.exp(-0.02 * t), atol=1e-12)
    assert (found["call"] >= np.maximum(s - x * np.exp(-0.02 * t), 0) - 1e-12).all() and (found["call"] <= s).all()
    one = {
        "price": np.array([42.0]),
        "strike": np.array([40.0]),
        "years": np.array([0.5]),
        "rate": 0.1,
        "volatility": 0.2,
    }
    priced = r.black_scholes(one, np.array([0]))  # Hull, Options, Futures and Other Derivatives
    assert np.round(priced["call"], 2) == [4.76] and np.round(priced["put"], 2) == [0.81]


def test_mandelbrot_knows_points_of_the_set() -> None:
    """c = 0 and -1 stay for ever, -2 as well; 1 leaves at 0, 1, 2, 5 -> after three steps; the picture is symmetric."""
    told = {"left": -2.0, "top": -1.0, "step": 0.125, "limit": 50, "counts": np.empty((17, 25))}
    counts = r.mandelbrot(told, np.arange(17))["counts"]
    assert [int(counts[8, k]) for k in (0, 8, 16, 24)] == [50, 50, 50, 3]
    assert (counts == counts[::-1]).all() and counts.min() >= 1
    by_hand, z = 0, 0j
    while abs(z) <= 2:
        z, by_hand = z * z + (0.5 + 0.5j), by_hand + 1
    assert counts[12, 20] == by_hand
