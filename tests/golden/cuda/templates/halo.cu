// test_templates CASES odd groups
// {"generator": "cuda", "params": [["bc", 4], ["bn", 16], ["cluster", false], ["split", 1], ["stages", 1], ["template", "halo"], ["th", 3], ["tw", 5], ["wide", false], ["wk", 4], ["wm", 16], ["wn", 16]]}
// k_pack: (12, 1, 1) x (256, 1, 1), 0 bytes
// k: (6, 1, 3) x (128, 1, 1), 6224 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
template <int M, int N>
W_FN void w_products_f16(float (&acc)[M][2 * N][4], const u32 (&a)[M][4], const uint4 (&b)[N]) {
  #pragma unroll
  for (int i = 0; i < M; ++i)
    #pragma unroll
    for (int j = 0; j < N; ++j) {
      w_mma_f16(acc[i][2 * j], a[i], b[j].x, b[j].y);
      w_mma_f16(acc[i][2 * j + 1], a[i], b[j].z, b[j].w);
    }
}
__device__ const int w_taps[] = {0,8,16,56,64,72,112,120,128,0,0,0,0,0,0,0};
extern "C" __global__ void __launch_bounds__(128) k(const void* __restrict__ in0, const void* __restrict__ in2,
    const void* __restrict__ pk, void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { TABLES = 6144, TAPS = 6144, FLAG = 6208 };
  const u32 sb = w_shared(sm);
  (void)sb;
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int tile = role.block_x(), n0 = 0, g = role.block_z(), b = 0;
  const int img = tile / 6, y0 = tile / 2 % 3 * 3, x0 = tile % 2 * 5;
  (void)g; (void)b; (void)n0;
  const u16* const A = (const u16*)in0 + img * 972 + g * 4;
  const char* const W = (const char*)pk + (long long)g * 2048;
  const int first = role.block_y();
  const int last = role.block_y() + 1;
  auto fill_w = [&](int cb, u32 to) {
    const char* const from = W + cb * 2048;
    _Pragma("unroll")
    for (int i = 0; i < 1; ++i) {
      const int x = t + i * 128;
      {
        w_copy16(to + x * 16, from + x * 16);
      }
    }
  };
  _Pragma("unroll")
  for (int i = 0; i < 1; ++i)
    if (first + i < last) fill_w(first + i, sb + i * 2336 + 288);
  for (int i = t; i < 16; i += 128) ((int*)(sm + TAPS))[i] = w_taps[i];
  // the halo tile: all pixels that a tile reads, once, whichever taps read them
  int ao[1], at[1];
  _Pragma("unroll")
  for (int i = 0; i < 1; ++i) {
    const int x = t + i * 128;
    if (x < 35) {
      const int pix = x % 35, iy = pix / 7, ix = pix % 7;
      at[i] = iy * 56 + ix * 8 + (x / 35) * 16;
      const int py = y0 + iy, px = x0 + ix;
      ao[i] = (u32)(py - 1) < 9u && (u32)(px - 1) < 9u ? (py - 1) * 108 + (px - 1) * 12 : -1;
    }
  }
  auto fill_a = [&](int cb, int to) {
    (void)cb;
    _Pragma("unroll")
    for (int i0 = 0; i0 < 1; i0 += 1) {
      uint2 v[1][1] = {};
      int to_[1];
      _Pragma("unroll")
      for (int j = 0; j < 1; ++j) {
        const int i = i0 + j, x = t + i * 128;
        if (i < 1) {
          const int ch = 0;
          const bool ok = x < 35 && ao[i] >= 0;
          to_[j] = at[i];
          _Pragma("unroll")
          for (int e = 0; e < 1; ++e) w_read_if(v[j][e], A + ao[i] + (ch + e * 4), ok);
        }
      }
      w_together();
      _Pragma("unroll")
      for (int j = 0; j < 1; ++j) {
        const int i = i0 + j, x = t + i * 128;
        if (i < 1 && x < 35) *(uint2*)(sm + to + to_[j]) = make_uint2(v[j][0].x, v[j][0].y);
      }
    }
  };
  const int wk = warp, row0 = 0, col0 = 0;
  (void)wk;
  int from[1][2];
  #pragma unroll
  for (int i = 0; i < 1; ++i) {
    {
      int m = row0 + i * 16 + (lane >> 2);
      m = m < 15 ? m : 0;
      from[i][0] = m / 5 * 56 + m % 5 * 8;
    }
    {
      int m = row0 + i * 16 + ((lane >> 2) + 8);
      m = m < 15 ? m : 0;
      from[i][1] = m / 5 * 56 + m % 5 * 8;
    }
  }
  float acc[1][2][4];
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j)
      #pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0f;
  auto multiply = [&](int a, int w) {
    const int* const taps = (const int*)(sm + TAPS) + wk * 4 + (lane & 3);
    const uint4* const fragments = (const uint4*)(sm + w) + (col0 >> 4) * 32 + lane;
    {
      const uint4* const part = fragments;
      u32 fa0[1][4], fa1[1][4];
      uint4 fw0[1], fw1[1];
      {
        const int off = taps[0];
        {
          const uint2 lo = *(const uint2*)(sm + a + from[0][0] + off), hi = *(const uint2*)(sm + a + from[0][1] + off);
          fa0[0][0] = lo.x;
          fa0[0][1] = hi.x;
          fa0[0][2] = lo.y;
          fa0[0][3] = hi.y;
        }
        if (wk * 4 + (lane & 3) >= 9) {
          fa0[0][0] = 0;
          fa0[0][1] = 0;
          fa0[0][2] = 0;
          fa0[0][3] = 0;
        }
      }
      fw0[0] = part[wk * 32];
      w_products_f16(acc, fa0, fw0);
    }
  };
  if (t < 2) {
    const int n = n0 + t * 64;
    w_prefetch((const u16*)in2 + g * 3 + (n < 3 ? n : 2));
  }
  // the image waits for the kernels before; weights, which are constants, are on their way already
  role.pdl_wait();
  role.pdl_trigger();
  _Pragma("unroll")
  for (int i = 0; i < 1; ++i) {
    if (first + i < last) fill_a(first + i, i * 2336);
    w_commit();
  }
  {
    const int i = 0;
    w_arrived<0>();
    role.sync();
    multiply(i * 2336, i * 2336 + 288);
  }
  w_arrived<0>();
  role.sync();
  float* const sums = (float*)sm;
  float* const mine = sums + wk * 384;
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
      float* const at = mine + (row0 + i * 16 + (lane >> 2)) * 24 + col0 + j * 8 + (lane & 3) * 2;
      *(float2*)at = make_float2(acc[i][j][0], acc[i][j][1]);
      *(float2*)(at + 192) = make_float2(acc[i][j][2], acc[i][j][3]);
    }
  role.sync();
  for (int x = t; x < 256; x += 128) {
    const int r = x / 16, q = x % 16;
    const int m = (img * 9 + y0 + r / 5) * 9 + x0 + r % 5, n = n0 + q;
    if (r < 15 && x0 + r % 5 < 9 && n < 3) {
      float acc[1];
      #pragma unroll
      for (int i = 0; i < 1; ++i) {
        acc[i] = sums[r * 24 + q + i];
        #pragma unroll
        for (int y = 1; y < 4; ++y) acc[i] += sums[(y * 16 + r) * 24 + q + i];
      }
      const u16* const x1p = (const u16*)in2 + (g * 3 + n);
      const w_f32 x1 = w_unpack_f16(*(x1p)).x;
      const w_f32 e2_0 = (acc[0] + x1);
      const w_f32 e3_0 = w_max_const(e2_0, 0.0f);
      u16* const y0 = (u16*)out0 + (m * 9 + g * 3 + n);
      *(y0) = (u16)w_narrow2_f16(e3_0, 0.0f);
    }
  }
}
extern "C" __global__ void k_pack(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 3072u) return;
  // lane and element of a fragment, as mma.sync holds them
  const int e = i % 8, lane = i / 8 % 32, pair = 0, step = i / 256 % 4;
  const int rest = i / 1024, cb = 0, nt = 0;
  const int g = rest, q = lane & 3, high = e >> 1 & 1;
  const int n = nt * 16 + pair * 16 + (e >> 2) * 8 + (lane >> 2);
  const int tap = step * 4 + q, ch = high * 2 + (e & 1);
  const int o = n, ky = tap / 3, kx = tap % 3;
  u16 v = 0;
  if (n < 3 && tap < 9 && ch < 4) v = ((const u16*)w)[g * 108 + o * 36 + ky * 3 + kx + ch * 9];
  ((u16*)pk)[i] = v;
}
