// How many steps of z = z^2 + c, from 0, stay within |z| <= 2, at most `limit`; c by the pixel. Every step is rounded by
// itself, so that counts are the same wherever they are computed.
extern "C" __global__ void __launch_bounds__(256)
mandelbrot(unsigned short* __restrict__ counts, int width, int height, float left, float top, float step, int limit) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= width || y >= height) return;
  const float cx = __fadd_rn(left, __fmul_rn((float)x, step)), cy = __fadd_rn(top, __fmul_rn((float)y, step));
  float zx = 0.0f, zy = 0.0f;
  int n = 0;
  for (; n < limit; ++n) {
    const float xx = __fmul_rn(zx, zx), yy = __fmul_rn(zy, zy);
    if (__fadd_rn(xx, yy) > 4.0f) break;
    zy = __fadd_rn(__fmul_rn(zx + zx, zy), cy);
    zx = __fadd_rn(__fsub_rn(xx, yy), cx);
  }
  counts[(long long)y * width + x] = (unsigned short)n;
}
