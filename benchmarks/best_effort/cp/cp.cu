// Coulomb potential of point charges on a plane: V(x) = sum_a q_a / |x - x_a|, every charge at every point. The charges
// stand in constant memory, few enough for its first cache. A thread computes `POINTS` points of a row, a warp apart, so
// that what a row has in common is computed once.
#ifndef ATOMS
#define ATOMS 64
#endif
#define WIDTH 32
#define HEIGHT 4
#define POINTS 8

__constant__ float4 atoms[ATOMS];  // x, y, z, charge

extern "C" __global__ void __launch_bounds__(WIDTH * HEIGHT)
cp(float* __restrict__ potential, int nx, float spacing, float height) {
  const int first = blockIdx.x * (WIDTH * POINTS) + threadIdx.x, row = blockIdx.y * HEIGHT + threadIdx.y;
  const float y = row * spacing;
  float x[POINTS], sums[POINTS];
#pragma unroll
  for (int i = 0; i < POINTS; ++i) x[i] = (first + i * WIDTH) * spacing, sums[i] = 0.0f;
#pragma unroll 2
  for (int a = 0; a < ATOMS; ++a) {
    const float4 atom = atoms[a];
    const float dy = y - atom.y, dz = height - atom.z;
    const float beside = dy * dy + dz * dz;
#pragma unroll
    for (int i = 0; i < POINTS; ++i) {
      const float dx = x[i] - atom.x;
      sums[i] += atom.w * rsqrtf(dx * dx + beside);
    }
  }
#pragma unroll
  for (int i = 0; i < POINTS; ++i) {
    const int column = first + i * WIDTH;
    if (column < nx) potential[(long long)row * nx + column] = sums[i];
  }
}
