// test_pooled CASES long kernel
// {"generator": "cuda", "params": [["bc", 16], ["bn", 16], ["early", true], ["ph", 2], ["pw", 4], ["split", 1], ["stages", 1], ["template", "pooled"], ["wk", 1], ["wm", 16], ["wn", 16]]}
// k_pack: (5, 1, 1) x (256, 1, 1), 0 bytes
// k: (3, 1, 1) x (64, 1, 1), 4880 bytes
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
    const void* __restrict__ pk, void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { TABLES = 4864, TAPS = 4864, FLAG = 4864 };
  const u32 sb = w_shared(sm);
  (void)sb;
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int tile = role.block_x(), n0 = 0, g = role.block_z(), b = 0;
  const int img = tile / 3, wy0 = tile % 3 * 2, wx0 = 0;
  const int y0 = wy0 * 2, x0 = wx0 * 2;
  (void)g; (void)b; (void)n0;
  const u16* const A = (const u16*)in0 + img * 1024;
  const char* const W = (const char*)pk + (long long)g * 2560;
  const int first = role.block_y();
  const int last = role.block_y() + 1;
  auto fill_w = [&](int cb, u32 to) {
    const char* const from = W + cb * 2560;
    _Pragma("unroll")
    for (int i = 0; i < 3; ++i) {
      const int x = t + i * 64;
      if (x < 160) { w_copy16(to + x * 16, from + x * 16); }
    }
  };
  _Pragma("unroll")
  for (int i = 0; i < 1; ++i)
    if (first + i < last) fill_w(first + i, sb + i * 4864 + 2304);
  // the halo tile: all pixels that a tile reads, once, whichever taps read them
  int ao[2], at[2];
  _Pragma("unroll")
  for (int i = 0; i < 2; ++i) {
    const int x = t + i * 64;
    if (x < 96) {
      const int pix = x / 2, iy = pix / 12, ix = pix % 12;
      at[i] = iy * 576 + ix * 48 + (x % 2) * 16;
      const int py = y0 + iy, px = x0 + ix;
      ao[i] = (u32)(py - 2) < 8u && (u32)(px - 2) < 8u ? (py - 2) * 128 + (px - 2) * 16 : -1;
    }
  }
  auto fill_a = [&](int cb, int to) {
    (void)cb;
    _Pragma("unroll")
    for (int i = 0; i < 2; ++i) {
      const int x = t + i * 64;
      if (x < 96) {
        const int ch = cb * 16 + (x % 2) * 8;
        const bool ok = ao[i] >= 0;
        w_copy16(sb + to + at[i], (ok ? A + ao[i] + ch : A), (ok ? 16u : 0u));
      }
    }
  };
  const int wk = warp / 2, row0 = warp % 2 * 16, col0 = 0;
  (void)wk;
  int from[1][1];
  #pragma unroll
  for (int i = 0; i < 1; ++i) {
    {
      int m = row0 + i * 16 + (lane & 15);
      from[i][0] = m / 8 * 576 + m % 8 * 48;
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
      fw0[0] = part[wk * 32];
      w_matrices(fa1[0], here + from[0][0] + 48);
      fw1[0] = part[(1 + wk) * 32];
      w_products_f16(acc, fa0, fw0);
      w_matrices(fa0[0], here + from[0][0] + 96);
      fw0[0] = part[(2 + wk) * 32];
      w_products_f16(acc, fa1, fw1);
      w_matrices(fa1[0], here + from[0][0] + 144);
      fw1[0] = part[(3 + wk) * 32];
      w_products_f16(acc, fa0, fw0);
      w_matrices(fa0[0], here + from[0][0] + 192);
      fw0[0] = part[(4 + wk) * 32];
      w_products_f16(acc, fa1, fw1);
      w_products_f16(acc, fa0, fw0);
    }
  };
  if (t < 2) {
    const int n = n0 + t * 64;
    w_prefetch((const u16*)in2 + g * 16 + (n < 16 ? n : 15));
  }
  // the image waits for the kernels before; weights, which are constants, are on their way already
  role.pdl_wait();
  role.pdl_trigger();
  _Pragma("unroll")
  for (int i = 0; i < 1; ++i) {
    if (first + i < last) fill_a(first + i, i * 4864);
    w_commit();
  }
  {
    const int i = 0;
    w_arrived<0>();
    role.sync();
    multiply(i * 4864, i * 4864 + 2304);
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
      const int cy = y0 + r / 8, cx = x0 + r % 8;
      const int m = (img * 12 + cy) * 8 + cx;
      (void)m;
      {
        const int q = col0 + j * 8 + (lane & 3) * 2, n = n0 + q;
        (void)n;
        {
          u16* const out0 = results + r * 24 + q;
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
  // each window from the tile of results; a result stands in several windows, and is computed once
  for (int x = t; x < 16; x += 64) {
    const int o = x / 2, q = x % 2 * 8, wy = wy0 + o / 4, wx = wx0 + o % 4, n = n0 + q;
    (void)n;
    {
      float best[8];
      #pragma unroll
      for (int e = 0; e < 8; ++e) best[e] = __int_as_float((int)0xff800000);
      #pragma unroll
      for (int ky = 0; ky < 2; ++ky)
        #pragma unroll
        for (int kx = 0; kx < 2; ++kx) {
          const int ty = o / 4 * 2 + ky, tx = o % 4 * 2 + kx;
          const int cy = y0 + ty, cx = x0 + tx, r = ty * 8 + tx;
          (void)cy; (void)cx;
          {
            float found[8];
            const uint4 hw = *(const uint4*)(results + r * 24 + q);
            {
              const float2 h = w_unpack_f16(hw.x);
              found[0] = h.x;
              found[1] = h.y;
            }
            {
              const float2 h = w_unpack_f16(hw.y);
              found[2] = h.x;
              found[3] = h.y;
            }
            {
              const float2 h = w_unpack_f16(hw.z);
              found[4] = h.x;
              found[5] = h.y;
            }
            {
              const float2 h = w_unpack_f16(hw.w);
              found[6] = h.x;
              found[7] = h.y;
            }
            #pragma unroll
            for (int e = 0; e < 8; ++e) best[e] = w_max_f32(best[e], found[e]);
          }
        }
      const int m = (img * 6 + wy) * 4 + wx;
      (void)m;
      u16* const y0 = (u16*)out0 + (m * 16 + n);
      *(uint4*)(y0) = make_uint4(w_narrow2_f16(best[0], best[1]), w_narrow2_f16(best[2], best[3]),
          w_narrow2_f16(best[4], best[5]), w_narrow2_f16(best[6], best[7]));
    }
  }
}
extern "C" __global__ void k_pack(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 1280u) return;
  // lane and element of a fragment, as mma.sync holds them
  const int e = i % 8, lane = i / 8 % 32, pair = 0, step = i / 256 % 5;
  const int rest = i / 1280, cb = 0, nt = 0;
  const int g = rest, q = lane & 3, high = e >> 1 & 1;
  const int n = nt * 16 + pair * 16 + (e >> 2) * 8 + (lane >> 2);
  const int tap = step, ch = cb * 16 + high * 8 + 2 * q + (e & 1);
  const int o = n, ky = tap / 5, kx = tap % 5;
  u16 v = 0;
  if (n < 16 && tap < 5 && ch < 16) v = ((const u16*)w)[g * 1280 + o * 80 + ky * 5 + kx + ch * 5];
  ((u16*)pk)[i] = v;
}
