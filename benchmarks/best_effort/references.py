"""What is right for every job, in NumPy, from the operations' definitions: float64 where results are floats.

A reference computes some rows of its results only (`jobs.Operation`), so that a sample of the full size is cheap.
Results of integers are those of the kernel bit by bit; where floats decide about integers, the kernels say how each is
rounded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.special

from benchmarks.best_effort.jobs import Array, Operation

Values = Mapping[str, Any]
Results = Mapping[str, Array]
"""By buffer."""


def _doubles(v: Values, *wanted: str) -> list[Array]:
    return [v[name].astype(np.float64) for name in wanted]


def mriq(v: Values, rows: Array) -> Results:
    """Q(x) = sum_k w_k exp(2πi k·x); samples (k, 4) of kx, ky, kz, w."""
    position = np.stack([v[name][rows].astype(np.float64) for name in "xyz"], axis=1)
    samples = v["samples"].astype(np.float64)
    q = np.exp(2j * np.pi * (position @ samples[:, :3].T)) @ samples[:, 3]
    return {"q_real": q.real, "q_imag": q.imag}


def sgemm(v: Values, rows: Array) -> Results:
    """d = alpha·a@b + beta·c, a (m, k), b (k, n), c (m, n)."""
    a, b, c = v["a"][rows].astype(np.float64), v["b"].astype(np.float64), v["c"][rows].astype(np.float64)
    return {"d": v["alpha"] * (a @ b) + v["beta"] * c}


def stencil(v: Values, rows: Array) -> Results:
    """out = centre·in + side·(sum of six neighbours) inside the box (z, y, x), in on its faces; rows are planes."""
    box = v["in"]
    nz = box.shape[0]
    here = box[rows].astype(np.float64)
    out = here.copy()
    inner = (rows > 0) & (rows < nz - 1)
    beside = (
        here[:, 1:-1, :-2] + here[:, 1:-1, 2:] + here[:, :-2, 1:-1] + here[:, 2:, 1:-1]
        + box[np.maximum(rows - 1, 0), 1:-1, 1:-1] + box[np.minimum(rows + 1, nz - 1), 1:-1, 1:-1]
    )  # fmt: skip
    stepped = v["centre"] * here[:, 1:-1, 1:-1] + v["side"] * beside
    out[inner, 1:-1, 1:-1] = stepped[inner]
    return {"out": out}


def histo(v: Values, rows: Array) -> Results:
    """counts[b] = how many values equal b."""
    parts = np.array_split(v["values"], -(-len(v["values"]) // (1 << 24)))  # `bincount` makes them eight bytes each
    counts = sum(
        (np.bincount(part, minlength=len(v["counts"])) for part in parts), np.zeros(len(v["counts"]), np.int64)
    )
    return {"counts": counts[rows].astype(np.uint32)}


def cp(v: Values, rows: Array) -> Results:
    """potential[y, x] = sum_a q_a / |(x·spacing, y·spacing, height) - atom a|; atoms (a, 4) of x, y, z, q."""
    x, y, z, charge = v["atoms"].astype(np.float64).T
    columns = np.arange(v["potential"].shape[1]) * v["spacing"]
    out = np.empty((len(rows), len(columns)))
    for i, row in enumerate(rows):
        square = (columns[:, None] - x) ** 2 + (row * v["spacing"] - y) ** 2 + (v["height"] - z) ** 2
        out[i] = (1.0 / np.sqrt(square)) @ charge
    return {"potential": out}


LATTICE = np.array(
    [
        (0, 0, 0), (1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1),
        (1, 1, 0), (-1, -1, 0), (1, -1, 0), (-1, 1, 0), (1, 0, 1), (-1, 0, -1), (1, 0, -1), (-1, 0, 1),
        (0, 1, 1), (0, -1, -1), (0, 1, -1), (0, -1, 1),
    ]
)  # fmt: skip
"""Velocities (x, y, z) of D3Q19."""
LATTICE_WEIGHTS = np.array([1 / 3] + [1 / 18] * 6 + [1 / 36] * 12)
_OPPOSITE = [int(np.flatnonzero((-e == LATTICE).all(axis=1))[0]) for e in LATTICE]


def lattice_step(f: Array, solid: Array, omega: float) -> Array:
    """One step on planes: f (19, planes + 2, ny, nx), solid (planes, ny, nx) → (19, planes, ny, nx); x, y periodic."""
    planes = f.shape[1] - 2
    moved = np.stack(
        [
            np.roll(f[i, 1 - ez : 1 - ez + planes], (ey, ex), axis=(1, 2)).astype(np.float64)
            for i, (ex, ey, ez) in enumerate(LATTICE)
        ]
    )
    density = moved.sum(axis=0)
    velocity = np.einsum("id,izyx->dzyx", LATTICE, moved) / density
    along = np.einsum("id,dzyx->izyx", LATTICE, velocity)
    square = (velocity**2).sum(axis=0)
    weights = LATTICE_WEIGHTS[:, None, None, None]
    equilibrium = weights * density * (1 + 3 * along + 4.5 * along**2 - 1.5 * square)
    relaxed = moved + omega * (equilibrium - moved)
    return np.where(solid, moved[_OPPOSITE], relaxed)


def lbm(v: Values, rows: Array) -> Results:
    """b: one step from a, and a: one step from that; both (19, nz, ny, nx), rows are planes."""
    f, solid, omega = v["a"], v["cell"] < v["solid_below"], v["omega"]
    nz = f.shape[1]
    first, second = [], []
    for row in rows:
        five, three = np.arange(row - 2, row + 3) % nz, np.arange(row - 1, row + 2) % nz
        once = lattice_step(f[:, five], solid[three], omega)
        first.append(once[:, 1])
        second.append(lattice_step(once, solid[[row]], omega)[:, 0])
    return {"b": np.stack(first, axis=1), "a": np.stack(second, axis=1)}


def fft(v: Values, rows: Array) -> Results:
    """out[b, k] = sum_j in[b, j] exp(sign 2πi jk/n); complex numbers are pairs (b, n, 2)."""
    x = v["in"][rows].astype(np.float64)
    n = x.shape[1]
    phase = np.arange(n)[:, None] * np.arange(n) % n  # integers: no digit of a large product is lost
    out = (x[..., 0] + 1j * x[..., 1]) @ np.exp(v["sign"] * 2j * np.pi / n * phase)
    return {"out": np.stack([out.real, out.imag], axis=-1)}


def mri_fhd(v: Values, rows: Array) -> Results:
    """image(x) = sum_k conj(phi_k) d_k exp(2πi k·x); positions and k-space (…, 4), complex numbers as pairs."""
    phi, data, k_space = (v[name].astype(np.float64) for name in ("phi", "data", "k_space"))
    rho = (phi[:, 0] - 1j * phi[:, 1]) * (data[:, 0] + 1j * data[:, 1])
    image = np.exp(2j * np.pi * (v["position"][rows, :3].astype(np.float64) @ k_space[:, :3].T)) @ rho
    return {"image": np.stack([image.real, image.imag], axis=-1)}


CELL_POINTS = 8
"""Lattice points along a cell's side in `cutcp`."""


def cutcp(v: Values, rows: Array) -> Results:
    """V(x) = sum_a q_a/r (1 - r²/c²)² over r < c; atoms (cz, cy, cx, a, 4) in cells of side 1; rows are planes.

    Every charge is looked at for every point of a plane: cells say only where charges are.
    """
    atoms, square = v["atoms"].astype(np.float64), v["cutoff"] ** 2
    ny, nx = (n * CELL_POINTS for n in atoms.shape[1:3])
    z, y, x = np.meshgrid(*map(np.arange, atoms.shape[:3]), indexing="ij")
    at = atoms[..., :3] + np.stack([x, y, z], axis=-1)[..., None, :]
    at, charge = at.reshape(-1, 3), atoms[..., 3].reshape(-1)
    along_x, along_y = ((np.arange(n) + 0.5) / CELL_POINTS for n in (nx, ny))
    out = np.zeros((len(rows), ny, nx))
    for i, row in enumerate(rows):
        height = (row + 0.5) / CELL_POINTS
        for (ax, ay, az), q in zip(at, charge, strict=True):
            if (az - height) ** 2 >= square:
                continue
            mine = [np.flatnonzero((p - a) ** 2 < square) for p, a in ((along_y, ay), (along_x, ax))]
            r2 = (along_y[mine[0], None] - ay) ** 2 + (along_x[mine[1]] - ax) ** 2 + (height - az) ** 2
            out[i][np.ix_(*mine)] += np.where(r2 < square, q / np.sqrt(r2) * (1 - r2 / square) ** 2, 0.0)
    return {"potential": out}


def tpacf(v: Values, rows: Array) -> Results:
    """counts (3, bins): pairs within the data, within the random points, and of both, by the bin of their cosine."""

    def directions(catalogue: str) -> list[Array]:
        x, y, z = (v[f"{catalogue}_{axis}"] for axis in "xyz")
        length = np.sqrt((x * x + y * y) + z * z)
        return [x / length, y / length, z / length]

    rising = -v["limits"][:-1]  # the last is none
    counts = np.zeros((3, len(rising) + 1), np.uint32)
    data, random = directions("data"), directions("random")
    for kind, (left, right) in enumerate([(data, data), (random, random), (data, random)]):
        for i in range(len(left[0])):
            first = i + 1 if left is right else 0
            products = [a[i] * b[first:] for a, b in zip(left, right, strict=True)]
            cosine = (products[0] + products[1]) + products[2]
            bins = np.searchsorted(rising, -cosine, side="left")
            counts[kind] += np.bincount(bins, minlength=counts.shape[1]).astype(np.uint32)
    return {"counts": counts[rows]}


def sad(v: Values, rows: Array) -> Results:
    """sums[m, b, o]: macroblock m (16 x 16), its block b (4 x 4), offset o = (dy, dx); frames (h, w) of bytes."""
    current, reference = v["current"].astype(np.int64), v["reference"].astype(np.int64)
    across = current.shape[1] // 16
    side = math.isqrt(v["sums"].shape[2])
    reach = side // 2
    wide = np.pad(reference, reach, mode="edge")
    out = np.empty((len(rows), *v["sums"].shape[1:]), np.uint16)
    for i, m in enumerate(rows):
        y, x = m // across * 16, m % across * 16
        window = wide[y : y + 16 + 2 * reach, x : x + 16 + 2 * reach]
        shifted = np.lib.stride_tricks.sliding_window_view(window, (16, 16))  # (dy, dx, 16, 16)
        apart = np.abs(shifted - current[y : y + 16, x : x + 16]).reshape(side, side, 4, 4, 4, 4)
        out[i] = apart.sum(axis=(3, 5)).transpose(2, 3, 0, 1).reshape(16, -1)
    return {"sums": out}


def spmv(v: Values, rows: Array) -> Results:
    """y[r] = sum of values[k, r]·x[columns[k, r]] over k < lengths[r]."""
    entry = np.arange(v["values"].shape[0])[:, None] < v["lengths"][rows]
    products = v["values"][:, rows].astype(np.float64) * v["x"].astype(np.float64)[v["columns"][:, rows]]
    return {"y": np.where(entry, products, 0.0).sum(axis=0)}


def hotspot3d(v: Values, rows: Array) -> Results:
    """One explicit step on a box (z, y, x), no heat through its faces; rows are planes."""
    box, nz = v["temperature"], v["temperature"].shape[0]
    here = box[rows].astype(np.float64)
    wide = np.pad(here, ((0, 0), (1, 1), (1, 1)), mode="edge")
    beside = v["along_x"] * (wide[:, 1:-1, :-2] + wide[:, 1:-1, 2:])
    beside += v["along_y"] * (wide[:, :-2, 1:-1] + wide[:, 2:, 1:-1])
    beside += v["along_z"] * (box[np.maximum(rows - 1, 0)].astype(np.float64) + box[np.minimum(rows + 1, nz - 1)])
    return {"out": v["centre"] * here + beside + v["heating"] * v["power"][rows].astype(np.float64) + v["sink"]}


def lavamd(v: Values, rows: Array) -> Results:
    """forces (boxes, particles, 4): sum_j 2a·u·(x_i - x_j) and sum_j u, u = q_j exp(-a r²), over boxes within one."""
    particles = v["particles"].astype(np.float64)
    nx, ny, nz = v["grid"]
    out = np.empty((len(rows), *particles.shape[1:]))
    for i, box in enumerate(rows):
        x, y, z = box % nx, box // nx % ny, box // nx // ny
        near = [
            particles[((z + dz) * ny + y + dy) * nx + x + dx] + [dx, dy, dz, 0]
            for dz, dy, dx in itertools.product((-1, 0, 1), repeat=3)
            if 0 <= z + dz < nz and 0 <= y + dy < ny and 0 <= x + dx < nx
        ]
        others = np.concatenate(near)
        apart = particles[box][:, None, :3] - others[None, :, :3]
        u = others[:, 3] * np.exp(-v["a"] * (apart**2).sum(axis=2))
        out[i, :, :3] = 2 * v["a"] * np.einsum("ij,ijd->id", u, apart)
        out[i, :, 3] = u.sum(axis=1)
    return {"forces": out}


def nn(v: Values, rows: Array) -> Results:
    """distances (records) as single precision rounds each step; nearest: bits of the least << 32 | its record."""

    def distances(records: Array) -> Array:
        dx, dy = (records[:, i] - np.float32(v[axis]) for i, axis in enumerate("xy"))
        found: Array = np.sqrt(dx * dx + dy * dy)
        return found

    everywhere = distances(v["records"])
    best = int(np.argmin(everywhere))  # the first of equal ones
    key = int(everywhere[best].view(np.uint32)) << 32 | best
    return {"distances": everywhere[rows], "nearest": np.array([key], np.uint64)}


def pathfinder(v: Values, rows: Array) -> Results:
    """Cheapest paths to rows of a wall (rows, columns): middle, half-way down, and end; rows are columns here."""
    wall, start = v["wall"], v["start"]
    depth, columns = wall.shape

    def cheapest(down: int) -> Array:
        at = rows[:, None] + np.arange(-down, down + 1)
        there = (at >= 0) & (at < columns)
        at = np.clip(at, 0, columns - 1)
        cost = np.where(there, start[at].astype(np.int64), _FAR)
        for r in range(down):
            best = np.minimum(np.minimum(cost[:, :-2], cost[:, 2:]), cost[:, 1:-1])
            inner = slice(r + 1, at.shape[1] - r - 1)
            cost = np.where(there[:, inner], best + wall[r][at[:, inner]], _FAR)
        return cost[:, 0].astype(np.int32)

    return {"middle": cheapest(depth // 2), "end": cheapest(depth)}


_FAR = 1 << 40
"""What no path costs."""


def crc32(v: Values, rows: Array) -> Results:
    """checks[m] = CRC-32 of message m: the remainder by the reflected polynomial, bit after bit."""
    messages = np.ascontiguousarray(v["messages"][rows]).view(np.uint8)
    check = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for byte in messages.T:
        check = check ^ byte
        for _ in range(8):
            check = check >> np.uint32(1) ^ np.where(check & np.uint32(1), np.uint32(0xEDB88320), np.uint32(0))
    return {"checks": ~check}


def _times_x(a: Array) -> Array:
    """x·a in GF(2^8) modulo x^8 + x^4 + x^3 + x + 1."""
    doubled: Array = (a << np.uint8(1)) ^ np.where(a & np.uint8(0x80), np.uint8(0x1B), np.uint8(0))
    return doubled


def aes_s_box() -> Array:
    """SubBytes (256,): the inverse in GF(2^8), then the affine map of FIPS 197, section 5.1.1."""
    power, logarithm = [1], {1: 0}
    for n in range(1, 255):  # powers of the generator x + 1
        last = np.array(power[-1], np.uint8)
        power.append(int(_times_x(last) ^ last))
        logarithm[power[-1]] = n
    inverse = np.array([0] + [power[-logarithm[a] % 255] for a in range(1, 256)], np.uint8)
    turned = [(inverse << np.uint8(k)) | (inverse >> np.uint8(8 - k)) for k in range(1, 5)]
    box: Array = inverse ^ turned[0] ^ turned[1] ^ turned[2] ^ turned[3] ^ np.uint8(0x63)
    return box


def aes_key_schedule(key: bytes) -> Array:
    """Round keys (11, 16) of a key of 16 bytes: FIPS 197, section 5.2."""
    box, constant = aes_s_box(), np.array([1, 0, 0, 0], np.uint8)
    words = [np.frombuffer(key, np.uint8)[4 * k : 4 * k + 4] for k in range(4)]
    for k in range(4, 44):
        word = words[-1]
        if k % 4 == 0:
            word = box[np.roll(word, -1)] ^ constant
            constant = _times_x(constant)
        words.append(words[k - 4] ^ word)
    return np.concatenate(words).reshape(11, 16)


def aes_encrypted(blocks: Array, round_keys: Array) -> Array:
    """Blocks (n, 16) of bytes by round keys (11, 16): the cipher of FIPS 197, section 5.1, step by step."""
    box = aes_s_box()
    rows_shifted = np.array([4 * ((c + r) % 4) + r for c in range(4) for r in range(4)])
    state = blocks ^ round_keys[0]
    for number in range(1, 11):
        state = box[state][:, rows_shifted]
        if number < 10:
            a = state.reshape(-1, 4, 4)
            b, c, d = (np.roll(a, -k, axis=2) for k in (1, 2, 3))
            state = (_times_x(a) ^ _times_x(b) ^ b ^ c ^ d).reshape(-1, 16)
        state = state ^ round_keys[number]
    return state


def aes(v: Values, rows: Array) -> Results:
    """out[n] = in[n] xor E(counter + n); blocks are (…, 4) little-endian words, keys and counter words big-endian."""
    counters = np.tile(v["counter"].astype(np.uint32), (len(rows), 1))
    counters[:, 3] += rows.astype(np.uint32)
    keys = v["round_keys"].astype(">u4").view(np.uint8).reshape(11, 16)
    stream = aes_encrypted(counters.astype(">u4").view(np.uint8).reshape(-1, 16), keys)
    return {"out": v["in"][rows] ^ np.ascontiguousarray(stream).view("<u4")}


def black_scholes(v: Values, rows: Array) -> Results:
    """call = S N(d1) - X exp(-rT) N(d2), put = X exp(-rT) N(-d2) - S N(-d1)."""
    s, x, t = (v[name][rows].astype(np.float64) for name in ("price", "strike", "years"))
    rate, volatility = v["rate"], v["volatility"]
    spread = volatility * np.sqrt(t)
    d1 = (np.log(s / x) + (rate + volatility**2 / 2) * t) / spread
    d2, discounted = d1 - spread, x * np.exp(-rate * t)
    return {
        "call": s * scipy.special.ndtr(d1) - discounted * scipy.special.ndtr(d2),
        "put": discounted * scipy.special.ndtr(-d2) - s * scipy.special.ndtr(-d1),
    }


def mandelbrot(v: Values, rows: Array) -> Results:
    """counts (height, width): steps of z² + c within |z| <= 2, each operation rounded to single precision."""
    left, top, step = (np.float32(v[name]) for name in ("left", "top", "step"))
    width = v["counts"].shape[1]
    cx = np.broadcast_to(left + np.arange(width, dtype=np.float32) * step, (len(rows), width)).reshape(-1)
    cy = np.repeat(top + rows.astype(np.float32) * step, width)
    counts = np.full(len(rows) * width, int(v["limit"]), np.uint16)
    alive: Array = np.arange(len(counts))
    zx: Array = np.zeros(len(counts), np.float32)
    zy = zx
    for n in range(int(v["limit"])):
        xx, yy = zx * zx, zy * zy
        inside = ~(xx + yy > np.float32(4))
        counts[alive[~inside]] = n
        alive = alive[inside]
        zy = (zx[inside] + zx[inside]) * zy[inside] + cy[alive]
        zx = (xx[inside] - yy[inside]) + cx[alive]
    return {"counts": counts.reshape(len(rows), width)}


OPERATIONS: Mapping[str, Operation] = {
    "mriq": Operation(mriq, {"q_real": 0, "q_imag": 0}),
    "sgemm": Operation(sgemm, {"d": 0}),
    "stencil": Operation(stencil, {"out": 0}, sample=8),
    "histo": Operation(histo, {"counts": 0}, sample=1 << 30),
    "cp": Operation(cp, {"potential": 0}, sample=16),
    "lbm": Operation(lbm, {"a": 1, "b": 1}, sample=4),
    "fft": Operation(fft, {"out": 0}, sample=64),
    "mri_fhd": Operation(mri_fhd, {"image": 0}),
    "cutcp": Operation(cutcp, {"potential": 0}, sample=4),
    "tpacf": Operation(tpacf, {"counts": 0}),
    "sad": Operation(sad, {"sums": 0}),
    "spmv": Operation(spmv, {"y": 0}, sample=4096),
    "hotspot3d": Operation(hotspot3d, {"out": 0}, sample=8),
    "lavamd": Operation(lavamd, {"forces": 0}, sample=64),
    "nn": Operation(nn, {"distances": 0}, sample=4096, whole=("nearest",)),
    "pathfinder": Operation(pathfinder, {"middle": 0, "end": 0}, sample=4096),
    "crc32": Operation(crc32, {"checks": 0}, sample=4096),
    "aes": Operation(aes, {"out": 0}, sample=4096),
    "black_scholes": Operation(black_scholes, {"call": 0, "put": 0}, sample=65536),
    "mandelbrot": Operation(mandelbrot, {"counts": 0}, sample=32),
}
"""By job."""
