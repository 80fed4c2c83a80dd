// test_templates CASES few rows, batched f32
// {"generator": "cuda", "params": [["cols", 2], ["slices", 1], ["template", "gemv"], ["unroll", 8], ["warps", 4]]}
// k: (2, 2, 1) x (128, 1, 1), 0 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h

W_FN float w_dot_f32(uint4 a, uint4 b, float c) {
  c = fmaf(__uint_as_float(a.x), __uint_as_float(b.x), c);
  c = fmaf(__uint_as_float(a.y), __uint_as_float(b.y), c);
  c = fmaf(__uint_as_float(a.z), __uint_as_float(b.z), c);
  return fmaf(__uint_as_float(a.w), __uint_as_float(b.w), c);
}
#define W_DOT(T) \
  W_FN float w_dot_word_##T(u32 a, u32 b, float c) { \
    const float2 x = w_unpack_##T(a), y = w_unpack_##T(b); \
    return fmaf(x.y, y.y, fmaf(x.x, y.x, c)); \
  } \
  W_FN float w_dot_##T(uint4 a, uint4 b, float c) { \
    c = w_dot_word_##T(a.y, b.y, w_dot_word_##T(a.x, b.x, c)); \
    return w_dot_word_##T(a.w, b.w, w_dot_word_##T(a.z, b.z, c)); \
  }
W_DOT(f16) W_DOT(bf16)
extern "C" __global__ void __launch_bounds__(128) k(const void* __restrict__ in0, const void* __restrict__ in1,
    const void* __restrict__ in2, void* __restrict__ out0) {
  static constexpr w_solo role{};
  __shared__ float sums[1][1][8];
  const int t = role.thread(), lane = t & 31, slice = 0, group = (t >> 5);
  const int g = role.block_y() / 2, b = role.block_y() % 2;
  (void)g; (void)b;
  const int n0 = role.block_x() * 8;
  const float* const A = (const float*)in0 + b * 64;
  const uint4* w[2];
  #pragma unroll
  for (int j = 0; j < 2; ++j) {
    int n = n0 + group * 2 + j;
    n = n < 10 ? n : 9;
    w[j] = (const uint4*)((const float*)in1 + b * 640 + n * 64);
  }
  const uint4* x[1];
  {
    const int m = 0;
    (void)m;
    x[0] = (const uint4*)(A);
  }
  float acc[1][2];
  uint4 h[1][2];
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j) acc[i][j] = 0.0f;
  auto read = [&](int at) {
    #pragma unroll
    for (int u = 0; u < 1; ++u) {
      const int k = at + u * 32;
      #pragma unroll
      for (int j = 0; j < 2; ++j) h[u][j] = k < 16 ? w[j][k] : make_uint4(0, 0, 0, 0);
    }
  };
  // a warp reads columns of weights 16 bytes at a time, the next ones while these are multiplied
  const int start = slice * 32 + lane;
  if (t < 2) {
    const int n = n0 + t * 32;
    w_prefetch((const float*)in2 + (n < 10 ? n : 9));
  }
  role.pdl_wait();
  role.pdl_trigger();
  read(start);
  for (int at = start; at < 16; at += 32) {
    #pragma unroll
    for (int u = 0; u < 1; ++u) {
      const int k = at + u * 32;
      if (k < 16) {
        #pragma unroll
        for (int i = 0; i < 1; ++i) {
          const uint4 q = x[i][k];
          #pragma unroll
          for (int j = 0; j < 2; ++j) acc[i][j] = w_dot_f32(q, h[u][j], acc[i][j]);
        }
      }
    }
    read(at + 32);
  }
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
      #pragma unroll
      for (int d = 16; d; d >>= 1) acc[i][j] += w_shfl(acc[i][j], d);
      if (lane == 0) sums[slice][i][group * 2 + j] = acc[i][j];
    }
  // epilogue
  role.sync();
  for (int e = t; e < 8; e += 128) {
    const int m = e / 8, n = n0 + e % 8;
    if (n < 10) {
      float acc[1] = {sums[0][m][n - n0]};
      const float* const x0p = (const float*)in2 + n;
      const w_f32 x0 = *(x0p);
      const w_f32 e1_0 = (acc[0] + x0);
      float* const y0 = (float*)out0 + (b * 10 + n);
      *(y0) = e1_0;
    }
  }
}
