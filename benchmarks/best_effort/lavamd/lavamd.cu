// Forces and energies of particles that interact within their box and the 26 around it, by a Gaussian potential:
//   u_ij = q_j exp(-a r_ij^2), energy_i = sum_j u_ij, force_i = sum_j 2 a u_ij (x_i - x_j)
// A block does one box. All particles of the 27 boxes are in shared memory; each of `PARTS` groups of threads, one thread
// a particle of the box, meets its part of them, and the first group adds what the others found. Lengths are scaled by
// sqrt(a / ln 2) there, so that the exponent is to base 2 and the square of the distance.
#ifndef PARTICLES
#define PARTICLES 32  // a multiple of PARTS
#endif
#define PARTS 4
#define THREADS (PARTICLES * PARTS)
#define SEEN (27 * PARTICLES)
#define LOADS ((27 + PARTS - 1) / PARTS)

extern "C" __global__ void __launch_bounds__(THREADS)
lavamd(const float4* __restrict__ particles, float4* __restrict__ forces, float a) {
  __shared__ float4 seen[SEEN];
  __shared__ float4 found[PARTS - 1][PARTICLES];
  const int t = threadIdx.x, own = t % PARTICLES, part = t / PARTICLES;
  const int nx = gridDim.x, ny = gridDim.y, nz = gridDim.z;
  const int box = (blockIdx.z * ny + blockIdx.y) * nx + blockIdx.x;
  const float scale = __fsqrt_rn(a * 1.442695041f);
  float4 others[LOADS];  // all on their way before the first is waited for
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int n = part + i * PARTS, dx = n % 3 - 1, dy = n / 3 % 3 - 1, dz = n / 9 - 1;
    const int x = blockIdx.x + dx, y = blockIdx.y + dy, z = blockIdx.z + dz;
    const bool there = x >= 0 && x < nx && y >= 0 && y < ny && z >= 0 && z < nz;
    const int from = there ? (z * ny + y) * nx + x : box;
    float4 other = particles[from * PARTICLES + own];  // x, y, z within its box of side 1; charge
    if (!there) other.w = 0.0f;
    others[i] = other;
  }
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int n = part + i * PARTS, dx = n % 3 - 1, dy = n / 3 % 3 - 1, dz = n / 9 - 1;
    const float4 other = others[i];
    if (n < 27)
      seen[n * PARTICLES + own] =
          make_float4((other.x + dx) * scale, (other.y + dy) * scale, (other.z + dz) * scale, other.w);
  }
  __syncthreads();
  const float4 me = seen[13 * PARTICLES + own];
  float fx = 0.0f, fy = 0.0f, fz = 0.0f, energy = 0.0f;
#pragma unroll 6
  for (int j = 0; j < SEEN / PARTS; ++j) {
    const float4 other = seen[j * PARTS + part];
    const float rx = me.x - other.x, ry = me.y - other.y, rz = me.z - other.z;
    const float u = other.w * exp2f(-rx * rx - ry * ry - rz * rz);
    energy += u;
    fx += u * rx;
    fy += u * ry;
    fz += u * rz;
  }
  if (part > 0) found[part - 1][own] = make_float4(fx, fy, fz, energy);
  __syncthreads();
  if (part == 0) {
#pragma unroll
    for (int p = 0; p < PARTS - 1; ++p) {
      const float4 more = found[p][own];
      fx += more.x, fy += more.y, fz += more.z, energy += more.w;
    }
    const float back = 2.0f * a / scale;
    forces[box * PARTICLES + own] = make_float4(back * fx, back * fy, back * fz, energy);
  }
}
