// One step of Jacobi's method on a box: out = centre * in + side * (sum of the six neighbours); the faces of the box stay
// as they are. A thread computes four cells along x in each of two planes; what it shares with other threads of its block
// comes through the L1 cache. `nx` is a multiple of four. A fence keeps the compiler from putting
// loads off to save registers: all of a thread are under way before the first is used (`__restrict__` would undo it).
#define WIDTH 32
#define HEIGHT 4
#define PAIRS 2  // of planes

extern "C" __global__ void __launch_bounds__(WIDTH * HEIGHT * PAIRS)
stencil(const float* in, float* out, int nx, int ny, int nz, float centre, float side) {
  const int fours = nx / 4, area = fours * ny;
  const int x = blockIdx.x * WIDTH + threadIdx.x, y = blockIdx.y * HEIGHT + threadIdx.y;
  const int first = 2 * (blockIdx.z * PAIRS + threadIdx.z);
  if (x >= fours || y >= ny || first >= nz) return;
  const int north = y > 0 ? -fours : 0, south = y < ny - 1 ? fours : 0;
  const int west = x > 0 ? -1 : 0, east = x < fours - 1 ? 4 : 3;  // in cells, from the first of the four
  const float4* at = (const float4*)in + y * fours + x;
  float4 planes[4], n[2], s[2];
  float w[2], e[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4* here = at + min(max(first + i - 1, 0), nz - 1) * area;
    planes[i] = *here;
    if (i == 0 || i == 3) continue;
    n[i - 1] = here[north], s[i - 1] = here[south];
    w[i - 1] = ((const float*)here)[west], e[i - 1] = ((const float*)here)[east];
  }
  __threadfence_block();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int z = first + i;
    if (z >= nz) return;
    const float4 below = planes[i], here = planes[i + 1], above = planes[i + 2];
    float4 next;
    next.x = centre * here.x + side * (w[i] + here.y + n[i].x + s[i].x + below.x + above.x);
    next.y = centre * here.y + side * (here.x + here.z + n[i].y + s[i].y + below.y + above.y);
    next.z = centre * here.z + side * (here.y + here.w + n[i].z + s[i].z + below.z + above.z);
    next.w = centre * here.w + side * (here.z + e[i] + n[i].w + s[i].w + below.w + above.w);
    if (x == 0) next.x = here.x;
    if (x == fours - 1) next.w = here.w;
    ((float4*)out)[z * area + y * fours + x] = y == 0 || y == ny - 1 || z == 0 || z == nz - 1 ? here : next;
  }
}
