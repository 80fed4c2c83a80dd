// test_stacked CASES row-major result
// {"generator": "cuda", "params": [["bc", 16], ["bn", 32], ["ring", 1], ["stages", 1], ["template", "stacked"], ["th", 4], ["tw", 4], ["vm", 16], ["vn", 16], ["wm", 16], ["wn", 16]]}
// k_pack: (18, 1, 1) x (256, 1, 1), 0 bytes
// k_second: (4, 1, 1) x (256, 1, 1), 0 bytes
// k: (4, 1, 1) x (64, 1, 1), 13008 bytes
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
extern "C" __global__ void __launch_bounds__(64) k(const void* __restrict__ in0, const void* __restrict__ in2,
    const void* __restrict__ in4, const void* __restrict__ pk, const void* __restrict__ pv, void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { TABLES = 12992, TAPS = 12992, FLAG = 12992 };
  const u32 sb = w_shared(sm);
  (void)sb;
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int tile = role.block_x(), n0 = 0, g = 0, b = 0;
  const int img = tile / 4, y0 = tile / 2 % 2 * 4, x0 = tile % 2 * 4;
  auto fill_second = [&](int part) {
    const u32 to = sb + 10944;
    const char* const from = (const char*)pv + part * 2048;
    _Pragma("unroll")
    for (int i = 0; i < 2; ++i) {
      const int x = t + i * 64;
      {
        w_copy16(to + x * 16, from + x * 16);
      }
    }
  };
  for (int part = 0; part < 1; ++part) fill_second(part);
  (void)g; (void)b; (void)n0;
  const u16* const A = (const u16*)in0 + img * 576;
  const char* const W = (const char*)pk + (long long)g * 9216;
  const int first = role.block_y();
  const int last = role.block_y() + 1;
  auto fill_w = [&](int cb, u32 to) {
    const char* const from = W + cb * 9216;
    _Pragma("unroll")
    for (int i = 0; i < 9; ++i) {
      const int x = t + i * 64;
      {
        w_copy16(to + x * 16, from + x * 16);
      }
    }
  };
  _Pragma("unroll")
  for (int i = 0; i < 1; ++i)
    if (first + i < last) fill_w(first + i, sb + i * 10944 + 1728);
  // the halo tile: all pixels that a tile reads, once, whichever taps read them
  int ao[2], at[2];
  _Pragma("unroll")
  for (int i = 0; i < 2; ++i) {
    const int x = t + i * 64;
    if (x < 72) {
      const int pix = x / 2, iy = pix / 6, ix = pix % 6;
      at[i] = iy * 288 + ix * 48 + (x % 2) * 16;
      const int py = y0 + iy, px = x0 + ix;
      ao[i] = (u32)(py - 1) < 6u && (u32)(px - 1) < 6u ? (py - 1) * 96 + (px - 1) * 16 : -1;
    }
  }
  auto fill_a = [&](int cb, int to) {
    (void)cb;
    _Pragma("unroll")
    for (int i = 0; i < 2; ++i) {
      const int x = t + i * 64;
      if (x < 72) {
        const int ch = cb * 16 + (x % 2) * 8;
        const bool ok = ao[i] >= 0;
        w_copy16(sb + to + at[i], (ok ? A + ao[i] + ch : A), (ok ? 16u : 0u));
      }
    }
  };
  const int wk = warp / 2, row0 = 0, col0 = warp % 2 * 16;
  (void)wk;
  int from[1][1];
  #pragma unroll
  for (int i = 0; i < 1; ++i) {
    {
      int m = row0 + i * 16 + (lane & 15);
      from[i][0] = m / 4 * 288 + m % 4 * 48;
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
    const u32 mine = sb + a + (lane >> 4) * 16 + wk * 32;
    const uint4* const fragments = (const uint4*)(sm + w) + (col0 >> 4) * 32 + lane;
    {
      const uint4* const part = fragments;
      const u32 here = mine;
      u32 fa0[1][4], fa1[1][4];
      uint4 fw0[1], fw1[1];
      w_matrices(fa0[0], here + from[0][0]);
      fw0[0] = part[wk * 64];
      w_matrices(fa1[0], here + from[0][0] + 48);
      fw1[0] = part[(1 + wk) * 64];
      w_products_f16(acc, fa0, fw0);
      w_matrices(fa0[0], here + from[0][0] + 96);
      fw0[0] = part[(2 + wk) * 64];
      w_products_f16(acc, fa1, fw1);
      w_matrices(fa1[0], here + from[0][0] + 288);
      fw1[0] = part[(3 + wk) * 64];
      w_products_f16(acc, fa0, fw0);
      w_matrices(fa0[0], here + from[0][0] + 336);
      fw0[0] = part[(4 + wk) * 64];
      w_products_f16(acc, fa1, fw1);
      w_matrices(fa1[0], here + from[0][0] + 384);
      fw1[0] = part[(5 + wk) * 64];
      w_products_f16(acc, fa0, fw0);
      w_matrices(fa0[0], here + from[0][0] + 576);
      fw0[0] = part[(6 + wk) * 64];
      w_products_f16(acc, fa1, fw1);
      w_matrices(fa1[0], here + from[0][0] + 624);
      fw1[0] = part[(7 + wk) * 64];
      w_products_f16(acc, fa0, fw0);
      w_matrices(fa0[0], here + from[0][0] + 672);
      fw0[0] = part[(8 + wk) * 64];
      w_products_f16(acc, fa1, fw1);
      w_products_f16(acc, fa0, fw0);
    }
  };
  if (t < 2) {
    const int n = n0 + t * 64;
    w_prefetch((const u16*)in2 + g * 32 + (n < 32 ? n : 31));
  }
  if (t < 2) {
    const int n = n0 + t * 64;
    w_prefetch((const u16*)in4 + g * 24 + (n < 24 ? n : 23));
  }
  // the image waits for the kernels before; weights, which are constants, are on their way already
  role.pdl_wait();
  role.pdl_trigger();
  _Pragma("unroll")
  for (int i = 0; i < 1; ++i) {
    if (first + i < last) fill_a(first + i, i * 10944);
    w_commit();
  }
  {
    const int i = 0;
    w_arrived<0>();
    role.sync();
    multiply(i * 10944, i * 10944 + 1728);
  }
  w_arrived<0>();
  role.sync();
  // the convolution's results, rounded, in shared memory
  u16* const results = (u16*)sm;
  _Pragma("unroll")
  for (int j = 0; j < 2; ++j) {
    _Pragma("unroll")
    for (int i = 0; i < 2; ++i) {
      const int r = row0 + i * 8 + (lane >> 2);
      const int cy = y0 + r / 4, cx = x0 + r % 4;
      const int m = (img * 6 + cy) * 6 + cx;
      (void)m;
      {
        const int q = col0 + j * 8 + (lane & 3) * 2, n = n0 + q;
        (void)n;
        {
          u16* const out0 = results + r * 40 + q;
          const float own[2] = {acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]};
          const u16* const dx1p = (const u16*)in2 + n;
          w_f32 dx1[2];
          const u32 dx1w = *(const u32*)(dx1p);
          {
            const float2 h = w_unpack_f16(dx1w);
            dx1[0] = h.x;
            dx1[1] = h.y;
          }
          const w_f32 de2_0 = (own[0] + dx1[0]);
          const w_f32 de2_1 = (own[1] + dx1[1]);
          const w_f32 de3_0 = w_max_const(de2_0, 0.0f);
          const w_f32 de3_1 = w_max_const(de2_1, 0.0f);
          u16* const dy0 = (u16*)out0;
          *(u32*)(dy0) = w_narrow2_f16(de3_0, de3_1);
        }
      }
    }
  }
  role.sync();
  {
    const int part = 0;
    const int wk = warp / 2, row0 = 0, col0 = warp % 2 * 16;
    (void)wk;
    int from[1][1];
    #pragma unroll
    for (int i = 0; i < 1; ++i) {
      {
        int m = row0 + i * 16 + (lane & 15);
        from[i][0] = m / 16 * 1280 + m % 16 * 80;
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
      const u32 mine = sb + a + (lane >> 4) * 16 + wk * 64;
      const uint4* const fragments = (const uint4*)(sm + w) + (col0 >> 4) * 32 + lane;
      {
        const uint4* const part = fragments;
        const u32 here = mine;
        u32 fa0[1][4], fa1[1][4];
        uint4 fw0[1], fw1[1];
        w_matrices(fa0[0], here + from[0][0]);
        fw0[0] = part[wk * 2 * 64];
        w_matrices(fa1[0], here + from[0][0] + 32);
        fw1[0] = part[(1 + wk * 2) * 64];
        w_products_f16(acc, fa0, fw0);
        w_products_f16(acc, fa1, fw1);
      }
    };
    multiply(0, 10944);
    float* const sums = (float*)(sm + 1280);
    float* const mine = sums + wk * 640;
    #pragma unroll
    for (int i = 0; i < 1; ++i)
      #pragma unroll
      for (int j = 0; j < 2; ++j) {
        float* const at = mine + (row0 + i * 16 + (lane >> 2)) * 40 + col0 + j * 8 + (lane & 3) * 2;
        *(float2*)at = make_float2(acc[i][j][0], acc[i][j][1]);
        *(float2*)(at + 320) = make_float2(acc[i][j][2], acc[i][j][3]);
      }
    role.sync();
    for (int x = t; x < 512; x += 64) {
      const int r = x % 16, q = x / 16;
      const int m = (img * 6 + y0 + r / 4) * 6 + x0 + r % 4, n = n0 + q;
      if (y0 + r / 4 < 6 && x0 + r % 4 < 6 && n < 24) {
        float acc[1];
        #pragma unroll
        for (int i = 0; i < 1; ++i) { acc[i] = sums[r * 40 + q + i]; }
        const u16* const x1p = (const u16*)in4 + n;
        const w_f32 x1 = w_unpack_f16(*(x1p)).x;
        const w_f32 e2_0 = (acc[0] + x1);
        const w_f32 e3_0 = w_max_const(e2_0, 0.0f);
        u16* const y0 = (u16*)out0 + (m + n * 36);
        *(y0) = (u16)w_narrow2_f16(e3_0, 0.0f);
      }
    }
  }
}
extern "C" __global__ void k_pack(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 4608u) return;
  // lane and element of a fragment, as mma.sync holds them
  const int e = i % 8, lane = i / 8 % 32, pair = i / 256 % 2, step = i / 512 % 9;
  const int rest = i / 4608, cb = 0, nt = 0;
  const int g = rest, q = lane & 3, high = e >> 1 & 1;
  const int n = nt * 32 + pair * 16 + (e >> 2) * 8 + (lane >> 2);
  const int tap = step, ch = cb * 16 + high * 8 + 2 * q + (e & 1);
  const int o = n, ky = tap / 3, kx = tap % 3;
  u16 v = 0;
  if (n < 32 && tap < 9 && ch < 16) v = ((const u16*)w)[g * 4608 + o * 144 + ky * 3 + kx + ch * 9];
  ((u16*)pk)[i] = v;
}
extern "C" __global__ void k_second(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 1024u) return;
  // lane and element of a fragment, as mma.sync holds them
  const int e = i % 8, lane = i / 8 % 32, pair = i / 256 % 2, step = i / 512 % 2;
  const int rest = i / 1024, cb = 0, nt = 0;
  const int g = rest, q = lane & 3, high = e >> 1 & 1;
  const int n = nt * 32 + pair * 16 + (e >> 2) * 8 + (lane >> 2);
  const int tap = step / 2, ch = cb * 32 + step % 2 * 16 + high * 8 + 2 * q + (e & 1);
  const int o = n, ky = tap, kx = 0;
  u16 v = 0;
  if (n < 24 && tap < 1 && ch < 32) v = ((const u16*)w)[g * 768 + o * 32 + ky + kx + ch];
  ((u16*)pk)[i] = v;
}
