// One explicit step of heat conduction in a chip: each cell of a box exchanges heat with its six neighbours, none through
// the faces of the box, takes up its own power and leaks towards the ambient temperature (`sink` = leak * ambient).
// A thread computes four cells along x in each of two planes; what it shares with other threads of its block comes through
// the L1 cache. `nx` is a multiple of four. A fence keeps the compiler from putting loads off to save registers: all of a
// thread are under way before the first is used (`__restrict__` would undo it).
#define WIDTH 32
#define HEIGHT 4
#define PAIRS 2  // of planes

extern "C" __global__ void __launch_bounds__(WIDTH * HEIGHT * PAIRS)
hotspot3d(const float* temperature, const float* power, float* out, int nx, int ny, int nz, float centre, float along_x,
          float along_y, float along_z, float heating, float sink) {
  const int fours = nx / 4, area = fours * ny;
  const int x = blockIdx.x * WIDTH + threadIdx.x, y = blockIdx.y * HEIGHT + threadIdx.y;
  const int first = 2 * (blockIdx.z * PAIRS + threadIdx.z), start = y * fours + x;
  if (x >= fours || y >= ny || first >= nz) return;
  const int north = y > 0 ? -fours : 0, south = y < ny - 1 ? fours : 0;
  const int west = x > 0 ? -1 : 0, east = x < fours - 1 ? 4 : 3;  // in cells, from the first of the four
  float4 planes[4], n[2], s[2], p[2];
  float w[2], e[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = min(max(first + i - 1, 0), nz - 1) * area + start;
    const float4* here = (const float4*)temperature + at;
    planes[i] = *here;
    if (i == 0 || i == 3) continue;
    n[i - 1] = here[north], s[i - 1] = here[south], p[i - 1] = ((const float4*)power)[at];
    w[i - 1] = ((const float*)here)[west], e[i - 1] = ((const float*)here)[east];
  }
  __threadfence_block();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (first + i >= nz) return;
    const float4 below = planes[i], here = planes[i + 1], above = planes[i + 2];
    float4 next;
#define NEXT(c, left, right)                                                                 \
  next.c = centre * here.c + along_x * (left + right) + along_y * (n[i].c + s[i].c) +        \
           along_z * (below.c + above.c) + heating * p[i].c + sink
    NEXT(x, w[i], here.y);
    NEXT(y, here.x, here.z);
    NEXT(z, here.y, here.w);
    NEXT(w, here.z, e[i]);
#undef NEXT
    ((float4*)out)[(first + i) * area + start] = next;
  }
}
