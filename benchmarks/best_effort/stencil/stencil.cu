// One step of Jacobi's method on a box: out = centre * in + side * (sum of the six neighbours); the faces of the box stay
// as they are. A block goes up `DEPTH` planes: neighbours below and above are in registers, those beside in shared memory.
#define WIDTH 32
#define HEIGHT 8
#ifndef DEPTH
#define DEPTH 32
#endif

extern "C" __global__ void __launch_bounds__(WIDTH * HEIGHT)
stencil(const float* __restrict__ in, float* __restrict__ out, int nx, int ny, int nz, float centre, float side) {
  __shared__ float plane[HEIGHT + 2][WIDTH + 2];
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int x = blockIdx.x * WIDTH + tx, y = blockIdx.y * HEIGHT + ty, first = blockIdx.z * DEPTH;
  const bool inside = x < nx && y < ny;
  const bool held = x == 0 || y == 0 || x >= nx - 1 || y >= ny - 1;
  const long long area = (long long)nx * ny;
  const float* at = in + first * area + (long long)y * nx + x;
  float* to = out + first * area + (long long)y * nx + x;
  float below = inside && first > 0 ? at[-area] : 0.0f;
  float here = inside ? at[0] : 0.0f;
  const int last = min(first + DEPTH, nz);
  for (int z = first; z < last; ++z) {
    const float above = inside && z + 1 < nz ? at[area] : 0.0f;
    plane[ty + 1][tx + 1] = here;
    if (ty == 0 && inside && y > 0) plane[0][tx + 1] = at[-nx];
    if (ty == HEIGHT - 1 && inside && y + 1 < ny) plane[HEIGHT + 1][tx + 1] = at[nx];
    if (tx == 0 && inside && x > 0) plane[ty + 1][0] = at[-1];
    if (tx == WIDTH - 1 && inside && x + 1 < nx) plane[ty + 1][WIDTH + 1] = at[1];
    __syncthreads();
    if (inside) {
      const float beside = plane[ty + 1][tx] + plane[ty + 1][tx + 2] + plane[ty][tx + 1] + plane[ty + 2][tx + 1];
      *to = held || z == 0 || z == nz - 1 ? here : centre * here + side * (beside + below + above);
    }
    __syncthreads();
    below = here;
    here = above;
    at += area;
    to += area;
  }
}
