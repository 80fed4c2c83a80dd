// One time step of the lattice Boltzmann method, D3Q19 with a single relaxation time, on a periodic box:
// f_i(x, t + 1) = g - omega (g - g_eq), g = f_i(x - e_i, t). Cells marked solid send what reaches them back.
// The 19 distributions are arrays of their own, so that a warp reads and writes 32 neighbours along x at once. A fence keeps
// the compiler from putting loads off: all of a thread are under way before the first is used (`__restrict__` would undo it).
#define THREADS 256

__device__ __forceinline__ float equilibrium(float weight, float density, float along, float square) {
  return weight * density * (1.0f + along * (3.0f + 4.5f * along) - 1.5f * square);
}

extern "C" __global__ void __launch_bounds__(THREADS)
lbm(const float* from, float* to, const unsigned char* cell, int nx, float omega, int solid_below) {
  const int x = blockIdx.x * THREADS + threadIdx.x, y = blockIdx.y, z = blockIdx.z;
  if (x >= nx) return;
  const int ny = gridDim.y, nz = gridDim.z;
  const int xm = x == 0 ? nx - 1 : x - 1, xp = x == nx - 1 ? 0 : x + 1;
  const int ym = y == 0 ? ny - 1 : y - 1, yp = y == ny - 1 ? 0 : y + 1;
  const int zm = z == 0 ? nz - 1 : z - 1, zp = z == nz - 1 ? 0 : z + 1;
  const int cells = nx * ny * nz, here = (z * ny + y) * nx + x;  // 19 times as many are less than 2^31
#define AT(i, x, y, z) from[(i) * cells + ((z) * ny + (y)) * nx + (x)]
  // in the order: rest; +x -x +y -y +z -z; then xy, xz, yz with signs ++ -- +- -+
  const float f0 = AT(0, x, y, z);
  const float f1 = AT(1, xm, y, z), f2 = AT(2, xp, y, z);
  const float f3 = AT(3, x, ym, z), f4 = AT(4, x, yp, z);
  const float f5 = AT(5, x, y, zm), f6 = AT(6, x, y, zp);
  const float f7 = AT(7, xm, ym, z), f8 = AT(8, xp, yp, z), f9 = AT(9, xm, yp, z), f10 = AT(10, xp, ym, z);
  const float f11 = AT(11, xm, y, zm), f12 = AT(12, xp, y, zp), f13 = AT(13, xm, y, zp), f14 = AT(14, xp, y, zm);
  const float f15 = AT(15, x, ym, zm), f16 = AT(16, x, yp, zp), f17 = AT(17, x, ym, zp), f18 = AT(18, x, yp, zm);
#undef AT
  const bool solid = cell[here] < solid_below;
  __threadfence_block();
  const float density = f0 + (f1 + f2) + (f3 + f4) + (f5 + f6) + (f7 + f8) + (f9 + f10) + (f11 + f12) + (f13 + f14) +
                        (f15 + f16) + (f17 + f18);
  const float inverse = 1.0f / density;
  const float ux = inverse * (f1 - f2 + f7 - f8 + f9 - f10 + f11 - f12 + f13 - f14);
  const float uy = inverse * (f3 - f4 + f7 - f8 - f9 + f10 + f15 - f16 + f17 - f18);
  const float uz = inverse * (f5 - f6 + f11 - f12 - f13 + f14 + f15 - f16 - f17 + f18);
  const float square = ux * ux + uy * uy + uz * uz, keep = 1.0f - omega;
  // a solid cell computes as the others do and stores something else, so that warps stay together
#define RELAX(i, opposite, weight, along)                                \
  const float relaxed##i = keep * f##i + omega * equilibrium(weight, density, along, square);\
  to[i * cells + here] = solid ? f##opposite : relaxed##i
  RELAX(0, 0, 1.0f / 3.0f, 0.0f);
  RELAX(1, 2, 1.0f / 18.0f, ux);
  RELAX(2, 1, 1.0f / 18.0f, -ux);
  RELAX(3, 4, 1.0f / 18.0f, uy);
  RELAX(4, 3, 1.0f / 18.0f, -uy);
  RELAX(5, 6, 1.0f / 18.0f, uz);
  RELAX(6, 5, 1.0f / 18.0f, -uz);
  RELAX(7, 8, 1.0f / 36.0f, ux + uy);
  RELAX(8, 7, 1.0f / 36.0f, -ux - uy);
  RELAX(9, 10, 1.0f / 36.0f, ux - uy);
  RELAX(10, 9, 1.0f / 36.0f, uy - ux);
  RELAX(11, 12, 1.0f / 36.0f, ux + uz);
  RELAX(12, 11, 1.0f / 36.0f, -ux - uz);
  RELAX(13, 14, 1.0f / 36.0f, ux - uz);
  RELAX(14, 13, 1.0f / 36.0f, uz - ux);
  RELAX(15, 16, 1.0f / 36.0f, uy + uz);
  RELAX(16, 15, 1.0f / 36.0f, -uy - uz);
  RELAX(17, 18, 1.0f / 36.0f, uy - uz);
  RELAX(18, 17, 1.0f / 36.0f, uz - uy);
#undef RELAX
}
