// Coulomb potential on a lattice with a smooth cutoff: V(x) = sum_a q_a / r (1 - r^2 / c^2)^2 over charges with r < c.
// Space is divided into cells of side 1 with `ATOMS` charges each, whose positions are given within their cell; c is at most
// 1, so the 27 cells around a point hold all it sees. A block computes the 8 x 8 x 8 points of one cell.
#ifndef ATOMS
#define ATOMS 8
#endif
#define SIDE 8
#define THREADS (SIDE * SIDE * 2)
#define SEEN (27 * ATOMS)

extern "C" __global__ void __launch_bounds__(THREADS)
cutcp(const float4* __restrict__ atoms, float* __restrict__ potential, float cutoff) {
  __shared__ float4 seen[SEEN];
  const int nx = gridDim.x, ny = gridDim.y, nz = gridDim.z;
  const int tx = threadIdx.x, ty = threadIdx.y, tz = threadIdx.z;
  for (int i = (tz * SIDE + ty) * SIDE + tx; i < SEEN; i += THREADS) {
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
  const float px = (tx + 0.5f) / SIDE, py = (ty + 0.5f) / SIDE;
  const float square = cutoff * cutoff, inverse = 1.0f / square;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int a = 0; a < SEEN; ++a) {
    const float4 atom = seen[a];
    const float dx = px - atom.x, dy = py - atom.y;
    const float beside = dx * dx + dy * dy;
    if (beside >= square) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float dz = (tz + 2 * i + 0.5f) / SIDE - atom.z;
      const float r2 = dz * dz + beside;
      if (r2 < square) {
        const float smooth = 1.0f - r2 * inverse;
        sums[i] += atom.w * rsqrtf(r2) * smooth * smooth;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const long long z = blockIdx.z * SIDE + tz + 2 * i, y = blockIdx.y * SIDE + ty;
    potential[(z * (ny * SIDE) + y) * (nx * SIDE) + blockIdx.x * SIDE + tx] = sums[i];
  }
}
