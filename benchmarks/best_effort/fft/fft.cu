// Fourier transforms of 1024 complex numbers, many of them: X_k = sum_j x_j exp(sign 2 pi i j k / 1024).
// Stockham's form with passes of radix 16, 16 and 4: 64 threads do one transform, with 16 numbers each in registers, and a
// block does two. Between passes they go through shared memory; the order comes out right by itself.
#define POINTS 1024
#define EACH 16
#define LANES (POINTS / EACH)
#define TRANSFORMS 2  // of a block
#define ROW (LANES + LANES / 16)
#define PADDED (EACH * ROW)  // one number is left free behind 16: strides of 16 reach all banks

__device__ __forceinline__ float2 times(float2 a, float2 b) {
  return make_float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
}

// The transform of four numbers, `step` apart.
__device__ __forceinline__ void transform4(float2* x, int step, float sign) {
  const float2 a = x[0], b = x[step], c = x[2 * step], d = x[3 * step];
  const float2 even = make_float2(a.x + c.x, a.y + c.y), odd = make_float2(a.x - c.x, a.y - c.y);
  const float2 sum = make_float2(b.x + d.x, b.y + d.y), other = make_float2(b.x - d.x, b.y - d.y);
  x[0] = make_float2(even.x + sum.x, even.y + sum.y);
  x[step] = make_float2(odd.x - sign * other.y, odd.y + sign * other.x);
  x[2 * step] = make_float2(even.x - sum.x, even.y - sum.y);
  x[3 * step] = make_float2(odd.x + sign * other.y, odd.y - sign * other.x);
}

// The transform of sixteen numbers; number k of the result is in x[k % 4 * 4 + k / 4].
__device__ __forceinline__ void transform16(float2* x, float sign) {
  const float cosine[10] = {1.0f, 0.92387953f, 0.70710678f, 0.38268343f, 0.0f, 0.0f, -0.70710678f,
                            0.0f, 0.0f,        -0.92387953f};
  const float sine[10] = {0.0f, 0.38268343f, 0.70710678f, 0.92387953f, 1.0f, 0.0f, 0.70710678f,
                          0.0f, 0.0f,        -0.38268343f};
#pragma unroll
  for (int i = 0; i < 4; ++i) transform4(x + i, 4, sign);
#pragma unroll
  for (int q = 1; q < 4; ++q)
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      const float2 old = x[4 * q + i];
      x[4 * q + i] = q * i == 4 ? make_float2(-sign * old.y, sign * old.x)
                                : times(old, make_float2(cosine[q * i], sign * sine[q * i]));
    }
#pragma unroll
  for (int q = 0; q < 4; ++q) transform4(x + 4 * q, 1, sign);
}

extern "C" __global__ void __launch_bounds__(LANES * TRANSFORMS)
fft(const float2* __restrict__ in, float2* __restrict__ out, float sign) {
  __shared__ float2 exchanged[TRANSFORMS][PADDED];
  const int j = threadIdx.x % LANES, own = threadIdx.x / LANES;
  const long long at = ((long long)blockIdx.x * TRANSFORMS + own) * POINTS + j;
  float2* shared = exchanged[own];
  const int lane = j + j / 16;
  float2 x[EACH], w;
#pragma unroll
  for (int r = 0; r < EACH; ++r) x[r] = in[at + r * LANES];
  transform16(x, sign);
#pragma unroll
  for (int r = 0; r < EACH; ++r) shared[j * 17 + r] = x[r % 4 * 4 + r / 4];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < EACH; ++r) x[r] = shared[lane + r * ROW];
  const int k = j % 16;
  sincospif(sign * (float)k / 128, &w.y, &w.x);
  const float2 w2 = times(w, w), w3 = times(w2, w), w4 = times(w2, w2);
  float2 power = make_float2(1.0f, 0.0f);
#pragma unroll
  for (int q = 0; q < 4; ++q) {  // w^r, r = 4 q + ..., of few products each
    if (q > 0) power = q == 1 ? w4 : times(power, w4), x[4 * q] = times(x[4 * q], power);
    x[4 * q + 1] = times(x[4 * q + 1], q ? times(power, w) : w);
    x[4 * q + 2] = times(x[4 * q + 2], q ? times(power, w2) : w2);
    x[4 * q + 3] = times(x[4 * q + 3], q ? times(power, w3) : w3);
  }
  transform16(x, sign);
  __syncthreads();  // all have been read
#pragma unroll
  for (int r = 0; r < EACH; ++r) shared[j / 16 * 272 + k + r * 17] = x[r % 4 * 4 + r / 4];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < EACH; ++r) x[r] = shared[lane + r * ROW];
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    sincospif(sign * (float)(j + m * LANES) / 512, &w.y, &w.x);
    const float2 square = times(w, w);
    x[m + 4] = times(x[m + 4], w);
    x[m + 8] = times(x[m + 8], square);
    x[m + 12] = times(x[m + 12], times(square, w));
    transform4(x + m, 4, sign);
  }
#pragma unroll
  for (int r = 0; r < EACH; ++r) out[at + r * LANES] = x[r];
}
