// Fourier transforms of 1024 complex numbers, many of them: X_k = sum_j x_j exp(sign 2 pi i j k / 1024).
// Stockham's form with radix 4: a block does one transform, a thread four numbers in each of five passes. Between passes
// they go through shared memory; the order comes out right by itself.
#define POINTS 1024
#define QUARTER (POINTS / 4)

__device__ __forceinline__ int padded(int i) { return i + i / 32; }  // strides of 4, 16, ... reach all banks

__device__ __forceinline__ float2 times(float2 a, float2 b) {
  return make_float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
}

extern "C" __global__ void __launch_bounds__(QUARTER)
fft(const float2* __restrict__ in, float2* __restrict__ out, float sign) {
  __shared__ float re[POINTS + POINTS / 32], im[POINTS + POINTS / 32];
  const int j = threadIdx.x;
  in += (long long)blockIdx.x * POINTS;
  out += (long long)blockIdx.x * POINTS;
  float2 x[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) x[r] = in[j + r * QUARTER];
#pragma unroll
  for (int done = 1; done < POINTS; done *= 4) {
    const int k = j % done;
    if (done > 1) {
      float2 w;
      sincospif(sign * (float)k / (2 * done), &w.y, &w.x);
      const float2 square = times(w, w);
      x[1] = times(x[1], w);
      x[2] = times(x[2], square);
      x[3] = times(x[3], times(square, w));
    }
    const float2 even = make_float2(x[0].x + x[2].x, x[0].y + x[2].y), odd = make_float2(x[0].x - x[2].x, x[0].y - x[2].y);
    const float2 sum = make_float2(x[1].x + x[3].x, x[1].y + x[3].y);
    const float2 turned = make_float2(sign * (x[3].y - x[1].y), sign * (x[1].x - x[3].x));  // sign i (x1 - x3)
    x[0] = make_float2(even.x + sum.x, even.y + sum.y);
    x[1] = make_float2(odd.x + turned.x, odd.y + turned.y);
    x[2] = make_float2(even.x - sum.x, even.y - sum.y);
    x[3] = make_float2(odd.x - turned.x, odd.y - turned.y);
    if (4 * done == POINTS) break;
    const int to = (j - k) * 4 + k;
    if (done > 1) __syncthreads();  // the pass before has read all
#pragma unroll
    for (int r = 0; r < 4; ++r) re[padded(to + r * done)] = x[r].x, im[padded(to + r * done)] = x[r].y;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; ++r) x[r] = make_float2(re[padded(j + r * QUARTER)], im[padded(j + r * QUARTER)]);
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) out[j + r * QUARTER] = x[r];
}
