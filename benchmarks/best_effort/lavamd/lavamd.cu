// Forces and energies of particles that interact within their box and the 26 around it, by a Gaussian potential:
//   u_ij = q_j exp(-a r_ij^2), energy_i = sum_j u_ij, force_i = sum_j 2 a u_ij (x_i - x_j)
// A block does the particles of one box; those of a neighbour are in shared memory while all meet them.
#ifndef PARTICLES
#define PARTICLES 100
#endif
#define THREADS 128

extern "C" __global__ void __launch_bounds__(THREADS)
lavamd(const float4* __restrict__ particles, float4* __restrict__ forces, float a) {
  __shared__ float4 others[PARTICLES];
  const int t = threadIdx.x, nx = gridDim.x, ny = gridDim.y, nz = gridDim.z;
  const int box = (blockIdx.z * ny + blockIdx.y) * nx + blockIdx.x;
  const float4 own = t < PARTICLES ? particles[box * PARTICLES + t] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float fx = 0.0f, fy = 0.0f, fz = 0.0f, energy = 0.0f;
  for (int n = 0; n < 27; ++n) {
    const int dx = n % 3 - 1, dy = n / 3 % 3 - 1, dz = n / 9 - 1;
    const int x = blockIdx.x + dx, y = blockIdx.y + dy, z = blockIdx.z + dz;
    if (x < 0 || x >= nx || y < 0 || y >= ny || z < 0 || z >= nz) continue;
    __syncthreads();
    if (t < PARTICLES) {
      float4 other = particles[((z * ny + y) * nx + x) * PARTICLES + t];  // x, y, z within its box of side 1; charge
      other.x += dx, other.y += dy, other.z += dz;
      others[t] = other;
    }
    __syncthreads();
    if (t < PARTICLES) {
#pragma unroll 4
      for (int j = 0; j < PARTICLES; ++j) {
        const float4 other = others[j];
        const float rx = own.x - other.x, ry = own.y - other.y, rz = own.z - other.z;
        const float u = other.w * __expf(-a * (rx * rx + ry * ry + rz * rz));
        energy += u;
        fx += u * rx;
        fy += u * ry;
        fz += u * rz;
      }
    }
  }
  if (t < PARTICLES)
    forces[box * PARTICLES + t] = make_float4(2.0f * a * fx, 2.0f * a * fy, 2.0f * a * fz, energy);
}
