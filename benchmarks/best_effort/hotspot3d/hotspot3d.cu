// One explicit step of heat conduction in a chip: each cell of a box exchanges heat with its six neighbours, none through
// the faces of the box, takes up its own power and leaks towards the ambient temperature (`sink` = leak * ambient).
// A thread goes up `DEPTH` cells and keeps three of its column in registers; neighbours beside come through the L1 cache.
#define WIDTH 64
#define HEIGHT 4
#ifndef DEPTH
#define DEPTH 32
#endif

extern "C" __global__ void __launch_bounds__(WIDTH * HEIGHT)
hotspot3d(const float* __restrict__ temperature, const float* __restrict__ power, float* __restrict__ out, int nx, int ny,
          int nz, float centre, float along_x, float along_y, float along_z, float heating, float sink) {
  const int x = blockIdx.x * WIDTH + threadIdx.x, y = blockIdx.y * HEIGHT + threadIdx.y, first = blockIdx.z * DEPTH;
  if (x >= nx || y >= ny) return;
  const int west = x > 0 ? -1 : 0, east = x < nx - 1 ? 1 : 0, north = y > 0 ? -nx : 0, south = y < ny - 1 ? nx : 0;
  const long long area = (long long)nx * ny;
  long long at = first * area + (long long)y * nx + x;
  float below = temperature[first > 0 ? at - area : at], here = temperature[at];
  const int last = min(first + DEPTH, nz);
#pragma unroll 2
  for (int z = first; z < last; ++z) {
    const float above = z < nz - 1 ? temperature[at + area] : here;
    out[at] = centre * here + along_x * (temperature[at + west] + temperature[at + east]) +
              along_y * (temperature[at + north] + temperature[at + south]) + along_z * (below + above) +
              heating * power[at] + sink;
    below = here;
    here = above;
    at += area;
  }
}
