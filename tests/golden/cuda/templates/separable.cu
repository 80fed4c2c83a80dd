// test_separable CASES row-major result
// {"generator": "cuda", "params": [["bc", 48], ["bm", 64], ["bn", 16], ["cluster", false], ["split", 1], ["template", "separable"], ["wk", 1], ["wm", 16], ["wn", 16]]}
// k_pack: (6, 1, 1) x (256, 1, 1), 0 bytes
// k_vectors: (2, 1, 1) x (256, 1, 1), 0 bytes
// k: (2, 1, 1) x (128, 1, 1), 9584 bytes
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
extern "C" __global__ void __launch_bounds__(128) k(const void* __restrict__ in0, const void* __restrict__ in2,
    const void* __restrict__ in4, const void* __restrict__ pk, const void* __restrict__ pv, void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { VECTORS = 8704, FLAG = 9568 };
  const u32 sb = w_shared(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int m0 = role.block_x() / 2 * 64, n0 = role.block_x() % 2 * 16, g = 0, b = 0;
  (void)g; (void)b; (void)n0;
  const int cb = role.block_y(), c0 = cb * 48;
  {
    const char* const from = (const char*)pk + (role.block_x() % 2 + (u32)cb) * 1536;
    _Pragma("unroll")
    for (int i = 0; i < 1; ++i) {
      const int x = t + i * 128;
      if (x < 96) { w_copy16(sb + 7168 + x * 16, from + x * 16); }
    }
  }
  {
    const char* const from = (const char*)pv + cb * 864;
    _Pragma("unroll")
    for (int i = 0; i < 1; ++i) {
      const int x = t + i * 128;
      if (x < 54) { w_copy16(sb + VECTORS + x * 16, from + x * 16); }
    }
  }
  w_commit();
  const int wk = warp / 4, row0 = warp % 4 * 16, col0 = 0;
  (void)wk;
  int from[1][1];
  #pragma unroll
  for (int i = 0; i < 1; ++i) {
    {
      int m = row0 + i * 16 + (lane & 15);
      from[i][0] = m / 64 * 7168 + m % 64 * 112;
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
    const u32 mine = sb + a + (lane >> 4) * 16 + wk * 96;
    const uint4* const fragments = (const uint4*)(sm + w) + (col0 >> 4) * 32 + lane;
    {
      const uint4* const part = fragments;
      const u32 here = mine;
      u32 fa0[1][4], fa1[1][4];
      uint4 fw0[1], fw1[1];
      w_matrices(fa0[0], here + from[0][0]);
      fw0[0] = part[wk * 3 * 32];
      w_matrices(fa1[0], here + from[0][0] + 32);
      fw1[0] = part[(1 + wk * 3) * 32];
      w_products_f16(acc, fa0, fw0);
      w_matrices(fa0[0], here + from[0][0] + 64);
      fw0[0] = part[(2 + wk * 3) * 32];
      w_products_f16(acc, fa1, fw1);
      w_products_f16(acc, fa0, fw0);
    }
  };
  if (t < 2) {
    const int n = c0 + t * 64;
    w_prefetch((const u16*)in2 + (n < 48 ? n : 47));
  }
  if (t < 2) {
    const int n = n0 + t * 64;
    w_prefetch((const u16*)in4 + g * 24 + (n < 24 ? n : 23));
  }
  role.pdl_wait();
  role.pdl_trigger();
  w_arrived<0>();
  role.sync();
  // the depthwise convolution, rounded, into shared memory: the left operand of the product
  for (int x = t; x < 384; x += 128) {
    const int r = x / 6, n = c0 + x % 6 * 8, m = m0 + r;
    u16* const out0 = (u16*)(sm + r * 112) - c0;
    const bool live = m < 36;
    const int img = m / 36;
    const int y0 = m / 6 % 6 - 1;
    const int x0 = m % 6 - 1;
    const int place = img * 1728 + y0 * 288 + x0 * 48 + n;
    const u16* const A = (const u16*)in0 + place;
    const uint4* const k = (const uint4*)(sm + VECTORS) + x % 6 * 9;
    float acc[8];
    _Pragma("unroll")
    for (int e = 0; e < 8; ++e) acc[e] = 0.0f;
    {
      uint4 h0_0;
      w_read_if(h0_0, A, live && (u32)y0 < 6u && (u32)x0 < 6u);
      uint4 h0_1;
      w_read_if(h0_1, A + 48, live && (u32)y0 < 6u && (u32)(x0 + 1) < 6u);
      uint4 h0_2;
      w_read_if(h0_2, A + 96, live && (u32)y0 < 6u && (u32)(x0 + 2) < 6u);
      uint4 h1_0;
      w_read_if(h1_0, A + 288, live && (u32)(y0 + 1) < 6u && (u32)x0 < 6u);
      uint4 h1_1;
      w_read_if(h1_1, A + 336, live && (u32)(y0 + 1) < 6u && (u32)(x0 + 1) < 6u);
      uint4 h1_2;
      w_read_if(h1_2, A + 384, live && (u32)(y0 + 1) < 6u && (u32)(x0 + 2) < 6u);
      uint4 h2_0;
      w_read_if(h2_0, A + 576, live && (u32)(y0 + 2) < 6u && (u32)x0 < 6u);
      uint4 h2_1;
      w_read_if(h2_1, A + 624, live && (u32)(y0 + 2) < 6u && (u32)(x0 + 1) < 6u);
      uint4 h2_2;
      w_read_if(h2_2, A + 672, live && (u32)(y0 + 2) < 6u && (u32)(x0 + 2) < 6u);
      w_together();
      {
        const uint4 f = k[0];
        {
          const float2 h = w_unpack_f16(h0_0.x), w = w_unpack_f16(f.x);
          acc[0] = fmaf(h.x, w.x, acc[0]);
          acc[1] = fmaf(h.y, w.y, acc[1]);
        }
        {
          const float2 h = w_unpack_f16(h0_0.y), w = w_unpack_f16(f.y);
          acc[2] = fmaf(h.x, w.x, acc[2]);
          acc[3] = fmaf(h.y, w.y, acc[3]);
        }
        {
          const float2 h = w_unpack_f16(h0_0.z), w = w_unpack_f16(f.z);
          acc[4] = fmaf(h.x, w.x, acc[4]);
          acc[5] = fmaf(h.y, w.y, acc[5]);
        }
        {
          const float2 h = w_unpack_f16(h0_0.w), w = w_unpack_f16(f.w);
          acc[6] = fmaf(h.x, w.x, acc[6]);
          acc[7] = fmaf(h.y, w.y, acc[7]);
        }
      }
      {
        const uint4 f = k[1];
        {
          const float2 h = w_unpack_f16(h0_1.x), w = w_unpack_f16(f.x);
          acc[0] = fmaf(h.x, w.x, acc[0]);
          acc[1] = fmaf(h.y, w.y, acc[1]);
        }
        {
          const float2 h = w_unpack_f16(h0_1.y), w = w_unpack_f16(f.y);
          acc[2] = fmaf(h.x, w.x, acc[2]);
          acc[3] = fmaf(h.y, w.y, acc[3]);
        }
        {
          const float2 h = w_unpack_f16(h0_1.z), w = w_unpack_f16(f.z);
          acc[4] = fmaf(h.x, w.x, acc[4]);
          acc[5] = fmaf(h.y, w.y, acc[5]);
        }
        {
          const float2 h = w_unpack_f16(h0_1.w), w = w_unpack_f16(f.w);
          acc[6] = fmaf(h.x, w.x, acc[6]);
          acc[7] = fmaf(h.y, w.y, acc[7]);
        }
      }
      {
        const uint4 f = k[2];
        {
          const float2 h = w_unpack_f16(h0_2.x), w = w_unpack_f16(f.x);
          acc[0] = fmaf(h.x, w.x, acc[0]);
          acc[1] = fmaf(h.y, w.y, acc[1]);
        }
        {
          const float2 h = w_unpack_f16(h0_2.y), w = w_unpack_f16(f.y);
          acc[2] = fmaf(h.x, w.x, acc[2]);
          acc[3] = fmaf(h.y, w.y, acc[3]);
        }
        {
          const float2 h = w_unpack_f16(h0_2.z), w = w_unpack_f16(f.z);
          acc[4] = fmaf(h.x, w.x, acc[4]);
          acc[5] = fmaf(h.y, w.y, acc[5]);
        }
        {
          const float2 h = w_unpack_f16(h0_2.w), w = w_unpack_f16(f.w);
          acc[6] = fmaf(h.x, w.x, acc[6]);
          acc[7] = fmaf(h.y, w.y, acc[7]);
        }
      }
      {
        const uint4 f = k[3];
        {
          const float2 h = w_unpack_f16(h1_0.x), w = w_unpack_f16(f.x);
          acc[0] = fmaf(h.x, w.x, acc[0]);
          acc[1] = fmaf(h.y, w.y, acc[1]);
        }
        {
          const float2 h = w_unpack_f16(h1_0.y), w = w_unpack_f16(f.y);
          acc[2] = fmaf(h.x, w.x, acc[2]);
          acc[3] = fmaf(h.y, w.y, acc[3]);
        }
        {
          const float2 h = w_unpack_f16(h1_0.z), w = w_unpack_f16(f.z);
          acc[4] = fmaf(h.x, w.x, acc[4]);
          acc[5] = fmaf(h.y, w.y, acc[5]);
        }
        {
          const float2 h = w_unpack_f16(h1_0.w), w = w_unpack_f16(f.w);
          acc[6] = fmaf(h.x, w.x, acc[6]);
          acc[7] = fmaf(h.y, w.y, acc[7]);
        }
      }
      {
        const uint4 f = k[4];
        {
          const float2 h = w_unpack_f16(h1_1.x), w = w_unpack_f16(f.x);
          acc[0] = fmaf(h.x, w.x, acc[0]);
          acc[1] = fmaf(h.y, w.y, acc[1]);
        }
        {
          const float2 h = w_unpack_f16(h1_1.y), w = w_unpack_f16(f.y);
          acc[2] = fmaf(h.x, w.x, acc[2]);
          acc[3] = fmaf(h.y, w.y, acc[3]);
        }
        {
          const float2 h = w_unpack_f16(h1_1.z), w = w_unpack_f16(f.z);
          acc[4] = fmaf(h.x, w.x, acc[4]);
          acc[5] = fmaf(h.y, w.y, acc[5]);
        }
        {
          const float2 h = w_unpack_f16(h1_1.w), w = w_unpack_f16(f.w);
          acc[6] = fmaf(h.x, w.x, acc[6]);
          acc[7] = fmaf(h.y, w.y, acc[7]);
        }
      }
      {
        const uint4 f = k[5];
        {
          const float2 h = w_unpack_f16(h1_2.x), w = w_unpack_f16(f.x);
          acc[0] = fmaf(h.x, w.x, acc[0]);
          acc[1] = fmaf(h.y, w.y, acc[1]);
        }
        {
          const float2 h = w_unpack_f16(h1_2.y), w = w_unpack_f16(f.y);
          acc[2] = fmaf(h.x, w.x, acc[2]);
          acc[3] = fmaf(h.y, w.y, acc[3]);
        }
        {
          const float2 h = w_unpack_f16(h1_2.z), w = w_unpack_f16(f.z);
          acc[4] = fmaf(h.x, w.x, acc[4]);
          acc[5] = fmaf(h.y, w.y, acc[5]);
        }
        {
          const float2 h = w_unpack_f16(h1_2.w), w = w_unpack_f16(f.w);
          acc[6] = fmaf(h.x, w.x, acc[6]);
          acc[7] = fmaf(h.y, w.y, acc[7]);
        }
      }
      {
        const uint4 f = k[6];
        {
          const float2 h = w_unpack_f16(h2_0.x), w = w_unpack_f16(f.x);
          acc[0] = fmaf(h.x, w.x, acc[0]);
          acc[1] = fmaf(h.y, w.y, acc[1]);
        }
        {
          const float2 h = w_unpack_f16(h2_0.y), w = w_unpack_f16(f.y);
          acc[2] = fmaf(h.x, w.x, acc[2]);
          acc[3] = fmaf(h.y, w.y, acc[3]);
        }
        {
          const float2 h = w_unpack_f16(h2_0.z), w = w_unpack_f16(f.z);
          acc[4] = fmaf(h.x, w.x, acc[4]);
          acc[5] = fmaf(h.y, w.y, acc[5]);
        }
        {
          const float2 h = w_unpack_f16(h2_0.w), w = w_unpack_f16(f.w);
          acc[6] = fmaf(h.x, w.x, acc[6]);
          acc[7] = fmaf(h.y, w.y, acc[7]);
        }
      }
      {
        const uint4 f = k[7];
        {
          const float2 h = w_unpack_f16(h2_1.x), w = w_unpack_f16(f.x);
          acc[0] = fmaf(h.x, w.x, acc[0]);
          acc[1] = fmaf(h.y, w.y, acc[1]);
        }
        {
          const float2 h = w_unpack_f16(h2_1.y), w = w_unpack_f16(f.y);
          acc[2] = fmaf(h.x, w.x, acc[2]);
          acc[3] = fmaf(h.y, w.y, acc[3]);
        }
        {
          const float2 h = w_unpack_f16(h2_1.z), w = w_unpack_f16(f.z);
          acc[4] = fmaf(h.x, w.x, acc[4]);
          acc[5] = fmaf(h.y, w.y, acc[5]);
        }
        {
          const float2 h = w_unpack_f16(h2_1.w), w = w_unpack_f16(f.w);
          acc[6] = fmaf(h.x, w.x, acc[6]);
          acc[7] = fmaf(h.y, w.y, acc[7]);
        }
      }
      {
        const uint4 f = k[8];
        {
          const float2 h = w_unpack_f16(h2_2.x), w = w_unpack_f16(f.x);
          acc[0] = fmaf(h.x, w.x, acc[0]);
          acc[1] = fmaf(h.y, w.y, acc[1]);
        }
        {
          const float2 h = w_unpack_f16(h2_2.y), w = w_unpack_f16(f.y);
          acc[2] = fmaf(h.x, w.x, acc[2]);
          acc[3] = fmaf(h.y, w.y, acc[3]);
        }
        {
          const float2 h = w_unpack_f16(h2_2.z), w = w_unpack_f16(f.z);
          acc[4] = fmaf(h.x, w.x, acc[4]);
          acc[5] = fmaf(h.y, w.y, acc[5]);
        }
        {
          const float2 h = w_unpack_f16(h2_2.w), w = w_unpack_f16(f.w);
          acc[6] = fmaf(h.x, w.x, acc[6]);
          acc[7] = fmaf(h.y, w.y, acc[7]);
        }
      }
    }
    if (live) {
      const u16* const dx1p = (const u16*)in2 + n;
      w_f32 dx1[8];
      const uint4 dx1w = *(const uint4*)(dx1p);
      {
        const float2 h = w_unpack_f16(dx1w.x);
        dx1[0] = h.x;
        dx1[1] = h.y;
      }
      {
        const float2 h = w_unpack_f16(dx1w.y);
        dx1[2] = h.x;
        dx1[3] = h.y;
      }
      {
        const float2 h = w_unpack_f16(dx1w.z);
        dx1[4] = h.x;
        dx1[5] = h.y;
      }
      {
        const float2 h = w_unpack_f16(dx1w.w);
        dx1[6] = h.x;
        dx1[7] = h.y;
      }
      const w_f32 de2_0 = (acc[0] + dx1[0]);
      const w_f32 de2_1 = (acc[1] + dx1[1]);
      const w_f32 de2_2 = (acc[2] + dx1[2]);
      const w_f32 de2_3 = (acc[3] + dx1[3]);
      const w_f32 de2_4 = (acc[4] + dx1[4]);
      const w_f32 de2_5 = (acc[5] + dx1[5]);
      const w_f32 de2_6 = (acc[6] + dx1[6]);
      const w_f32 de2_7 = (acc[7] + dx1[7]);
      const w_f32 de3_0 = w_max_const(de2_0, 0.0f);
      const w_f32 de3_1 = w_max_const(de2_1, 0.0f);
      const w_f32 de3_2 = w_max_const(de2_2, 0.0f);
      const w_f32 de3_3 = w_max_const(de2_3, 0.0f);
      const w_f32 de3_4 = w_max_const(de2_4, 0.0f);
      const w_f32 de3_5 = w_max_const(de2_5, 0.0f);
      const w_f32 de3_6 = w_max_const(de2_6, 0.0f);
      const w_f32 de3_7 = w_max_const(de2_7, 0.0f);
      u16* const dy0 = (u16*)out0 + n;
      *(uint4*)(dy0) = make_uint4(w_narrow2_f16(de3_0, de3_1), w_narrow2_f16(de3_2, de3_3), w_narrow2_f16(de3_4, de3_5),
          w_narrow2_f16(de3_6, de3_7));
    } else *(uint4*)(out0 + n) = make_uint4(0, 0, 0, 0);
  }
  role.sync();
  multiply(0, 7168);
  role.sync();
  float* const sums = (float*)sm;
  float* const mine = sums + wk * 1536;
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
      float* const at = mine + (row0 + i * 16 + (lane >> 2)) * 24 + col0 + j * 8 + (lane & 3) * 2;
      *(float2*)at = make_float2(acc[i][j][0], acc[i][j][1]);
      *(float2*)(at + 192) = make_float2(acc[i][j][2], acc[i][j][3]);
    }
  role.sync();
  for (int x = t; x < 1024; x += 128) {
    const int r = x % 64, q = x / 64;
    const int m = m0 + r, n = n0 + q;
    if (m < 36 && n < 24) {
      float acc[1];
      #pragma unroll
      for (int i = 0; i < 1; ++i) { acc[i] = sums[r * 24 + q + i]; }
      const u16* const x1p = (const u16*)in4 + n;
      const w_f32 x1 = w_unpack_f16(*(x1p)).x;
      const w_f32 e2_0 = (acc[0] + x1);
      const w_f32 e3_0 = w_max_const(e2_0, 0.0f);
      u16* const y0 = (u16*)out0 + (m + n * 36);
      *(y0) = (u16)w_narrow2_f16(e3_0, 0.0f);
    }
  }
}
extern "C" __global__ void k_pack(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 1536u) return;
  // lane and element of a fragment, as mma.sync holds them
  const int e = i % 8, lane = i / 8 % 32, pair = 0, step = i / 256 % 3;
  const int rest = i / 768, cb = 0, nt = rest % 2;
  const int g = rest / 2, q = lane & 3, high = e >> 1 & 1;
  const int n = nt * 16 + pair * 16 + (e >> 2) * 8 + (lane >> 2);
  const int tap = step / 3, ch = cb * 48 + step % 3 * 16 + high * 8 + 2 * q + (e & 1);
  const int o = n, ky = tap, kx = 0;
  u16 v = 0;
  if (n < 24 && tap < 1 && ch < 48) v = ((const u16*)w)[g * 1152 + o * 48 + ky + kx + ch];
  ((u16*)pk)[i] = v;
}
extern "C" __global__ void k_vectors(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 432u) return;
  const int tap = i / 8 % 9, n = i / 72 * 8 + i % 8;
  ((u16*)pk)[i] = ((const u16*)w)[n * 9 + tap / 3 * 3 + tap % 3];
}
