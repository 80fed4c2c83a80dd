// Coulomb potential on a lattice with a smooth cutoff: V(x) = sum_a q_a / r (1 - r^2 / c^2)^2 over charges with r < c.
// Space is divided into cells of side 1 with `ATOMS` charges each, whose positions are given within their cell; c is at most
// 1, so the 27 cells around a point hold all it sees. A block computes the 8 x 8 x 8 points of one cell, a thread
// `POINTS` of them side by side. A charge out of reach adds zero: that takes fewer instructions than to branch around it.
#ifndef ATOMS
#define ATOMS 2
#endif
#define SIDE 8
#define POINTS 4
#define ACROSS (SIDE / POINTS)
#define THREADS (SIDE * SIDE * ACROSS)
#define SEEN (27 * ATOMS)

extern "C" __global__ void __launch_bounds__(THREADS)
cutcp(const float4* __restrict__ atoms, float* __restrict__ potential, float cutoff) {
  __shared__ float4 seen[SEEN];
  const int nx = gridDim.x, ny = gridDim.y, nz = gridDim.z;
  const int tx = threadIdx.x, ty = threadIdx.y, tz = threadIdx.z;
#pragma unroll 1
  for (int i = (tz * SIDE + ty) * ACROSS + tx; i < SEEN; i += THREADS) {
    const int cell = i / ATOMS, dx = cell % 3 - 1, dy = cell / 3 % 3 - 1, dz = cell / 9 - 1;
    const int x = blockIdx.x + dx, y = blockIdx.y + dy, z = blockIdx.z + dz;
    float4 atom = make_float4(9.0f, 9.0f, 9.0f, 0.0f);  // out of reach: there is no cell
    if (x >= 0 && x < nx && y >= 0 && y < ny && z >= 0 && z < nz) {
      atom = atoms[(((long long)z * ny + y) * nx + x) * ATOMS + i % ATOMS];
      atom.x += dx, atom.y += dy, atom.z += dz;
    }
    seen[i] = atom;
  }
  __syncthreads();
  const float py = (ty + 0.5f) / SIDE, pz = (tz + 0.5f) / SIDE;
  const float inverse = 1.0f / (cutoff * cutoff);
  float px[POINTS], sums[POINTS];
#pragma unroll
  for (int i = 0; i < POINTS; ++i) px[i] = (tx * POINTS + i + 0.5f) / SIDE, sums[i] = 0.0f;
#pragma unroll 6
  for (int a = 0; a < SEEN; ++a) {
    const float4 atom = seen[a];
    const float dy = py - atom.y, dz = pz - atom.z;
    const float beside = dy * dy + dz * dz;
#pragma unroll
    for (int i = 0; i < POINTS; ++i) {
      const float dx = px[i] - atom.x, r2 = dx * dx + beside;
      const float smooth = __saturatef(1.0f - r2 * inverse);  // 0 beyond the cutoff
      sums[i] += atom.w * rsqrtf(r2) * (smooth * smooth);
    }
  }
  const long long z = blockIdx.z * SIDE + tz, y = blockIdx.y * SIDE + ty;
  float* to = potential + (z * (ny * SIDE) + y) * (nx * SIDE) + blockIdx.x * SIDE + tx * POINTS;
  *(float4*)to = make_float4(sums[0], sums[1], sums[2], sums[3]);
}
