// test_normed NORMED rms
// {"generator": "cuda", "params": [["bk", 64], ["bm", 32], ["bn", 32], ["cluster", false], ["group", false], ["split", 1], ["stages", 3], ["template", "mma"], ["wk", 1], ["wm", 16], ["wn", 16]]}
// k_pack: (32, 1, 1) x (256, 1, 1), 0 bytes
// k: (4, 1, 1) x (128, 1, 1), 25104 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
// a store without a branch
#ifndef W_EMULATED
W_FN void w_store_if(void* p, uint4 v, bool in) {
  asm volatile("{ .reg .pred q; setp.ne.b32 q, %5, 0; @q st.global.v4.u32 [%0], {%1, %2, %3, %4}; }"
      ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((int)in) : "memory");
}
#endif
extern "C" __global__ void __launch_bounds__(128) k(const void* __restrict__ in0, const void* __restrict__ in3,
    const void* __restrict__ in1, const void* __restrict__ pk, void* __restrict__ out0, void* __restrict__ normed) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { TABLES = 24576, FLAG = 25088 };
  const u32 sb = w_shared(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int tn = role.block_x() % 2, m0 = role.block_x() / 2 * 32, n0 = tn * 32;
  const int g = role.block_z(), b = 0;
  (void)g; (void)b; (void)n0; (void)lane;
  const u16* const A = (const u16*)in0;
  const u16* const W = (const u16*)pk + ((long long)g * 2 + tn) * 4096;
  const int first = role.block_y() * 2, last = (role.block_y() + 1) * 2;
  for (int i = t; i < 128; i += 128)
    ((float*)(sm + TABLES))[i] = i < 72 ? w_unpack_f16(*((const u16*)in1 + i)).x : 0.0f;
  int ao[2];
  _Pragma("unroll")
  for (int i = 0; i < 2; ++i) {
    const int x = t + i * 128;
    {
      const int m = m0 + x / 8;
      ao[i] = m < 45 ? m * 72 : -1;
    }
  }
  float row0_[2];
  auto fix = [&](int kb, u32 to) {
    const int k = kb * 64 + t % 8 * 8;
    float c0_[8];
    {
      const float4 h_ = *(const float4*)((float*)(sm + TABLES) + k);
      c0_[0] = h_.x;
      c0_[1] = h_.y;
      c0_[2] = h_.z;
      c0_[3] = h_.w;
    }
    {
      const float4 h_ = *(const float4*)((float*)(sm + TABLES) + 4 + k);
      c0_[4] = h_.x;
      c0_[5] = h_.y;
      c0_[6] = h_.z;
      c0_[7] = h_.w;
    }
    _Pragma("unroll")
    for (int i = 0; i < 2; ++i) {
      const int x = t + i * 128;
      {
        const u32 at = to + (x / 8 * 8 + ((t % 8) ^ ((x / 8) & 7))) * 16;
        uint4* const here_ = (uint4*)(sm + (at - sb));
        uint4 w_ = *here_;
        {
          const float2 h_ = w_unpack_f16(w_.x);
          const float e0_2_ = h_.x;
          const float e0_13_ = (e0_2_ * row0_[i]);
          const float e0_16_ = (e0_13_ * c0_[0]);
          const float e1_2_ = h_.y;
          const float e1_13_ = (e1_2_ * row0_[i]);
          const float e1_16_ = (e1_13_ * c0_[1]);
          w_.x = w_narrow2_f16(e0_16_, e1_16_);
        }
        {
          const float2 h_ = w_unpack_f16(w_.y);
          const float e0_2_ = h_.x;
          const float e0_13_ = (e0_2_ * row0_[i]);
          const float e0_16_ = (e0_13_ * c0_[2]);
          const float e1_2_ = h_.y;
          const float e1_13_ = (e1_2_ * row0_[i]);
          const float e1_16_ = (e1_13_ * c0_[3]);
          w_.y = w_narrow2_f16(e0_16_, e1_16_);
        }
        {
          const float2 h_ = w_unpack_f16(w_.z);
          const float e0_2_ = h_.x;
          const float e0_13_ = (e0_2_ * row0_[i]);
          const float e0_16_ = (e0_13_ * c0_[4]);
          const float e1_2_ = h_.y;
          const float e1_13_ = (e1_2_ * row0_[i]);
          const float e1_16_ = (e1_13_ * c0_[5]);
          w_.z = w_narrow2_f16(e0_16_, e1_16_);
        }
        {
          const float2 h_ = w_unpack_f16(w_.w);
          const float e0_2_ = h_.x;
          const float e0_13_ = (e0_2_ * row0_[i]);
          const float e0_16_ = (e0_13_ * c0_[6]);
          const float e1_2_ = h_.y;
          const float e1_13_ = (e1_2_ * row0_[i]);
          const float e1_16_ = (e1_13_ * c0_[7]);
          w_.w = w_narrow2_f16(e0_16_, e1_16_);
        }
        if (k >= 72) w_ = make_uint4(0, 0, 0, 0);
        *here_ = w_;
        const int m = m0 + x / 8;
        w_store_if((u16*)normed + (long long)m * 72 + k, w_, tn == 0 && m < 45 && k < 72);
      }
    }
  };

  auto fill_a = [&](int kb, u32 to) {
    const int k = kb * 64 + t % 8 * 8;
    const u32 n16 = (k < 72 ? 16u : 0u);
    _Pragma("unroll")
    for (int i = 0; i < 2; ++i) {
      const int x = t + i * 128;
      {
        w_copy16(to + (x / 8 * 8 + ((t % 8) ^ ((x / 8) & 7))) * 16, (ao[i] >= 0 && n16 != 0 ? A + ao[i] + k : A),
            (ao[i] >= 0 ? n16 : 0u));
      }
    }
  };
  auto fill_w = [&](int kb, u32 to) {
    const char* const from = (const char*)(W + kb * 2048);
    _Pragma("unroll")
    for (int i = 0; i < 2; ++i) {
      const int x = t + i * 128;
      {
        w_copy16(to + x * 16, from + x * 16);
      }
    }
  };
  auto store_a = [&](u32 to) { (void)to; };
  auto store_w = [&](u32 to) { (void)to; };
  const int wk = warp / 4, row0 = warp / 2 % 2 * 16, col0 = warp % 2 * 16;
  (void)wk;
  float acc[1][2][4];
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j)
      #pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0f;
  auto multiply = [&](u32 a, u32 w) {
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int kk = wk * 4 + q;
      u32 fa[1][4], fw[1][4];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        w_matrices(fa[i], a + ((row0 + i * 16 + (lane & 15)) * 8 + ((kk * 2 + (lane >> 4))
            ^ ((row0 + i * 16 + (lane & 15)) & 7))) * 16);
      #pragma unroll
      for (int j = 0; j < 1; ++j)
        w_matrices(fw[j], w + ((col0 + j * 16 + (lane & 7) + ((lane >> 4) << 3)) * 8
            + ((kk * 2 + ((lane >> 3) & 1)) ^ ((col0 + j * 16 + (lane & 7) + ((lane >> 4) << 3)) & 7))) * 16);
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 1; ++j) {
          w_mma_f16(acc[i][2 * j], fa[i], fw[j][0], fw[j][1]);
          w_mma_f16(acc[i][2 * j + 1], fa[i], fw[j][2], fw[j][3]);
        }
    }
  };
  for (int i = 0; i < 2; ++i)
    if (first + i < last) fill_w(first + i, sb + (u32)((i % 3) * 8192) + 4096);
  role.sync();
  if (t < 2) {
    const int n = n0 + t * 64;
    w_prefetch((const u16*)in3 + (n < 40 ? n : 39));
  }
  // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
  role.pdl_wait();
  role.pdl_trigger();
  for (int i = 0; i < 2; ++i) {
    if (first + i < last) {
      fill_a(first + i, sb + (u32)((i % 3) * 8192));
      store_a(sb + (u32)((i % 3) * 8192));
    }
    w_commit();
  }
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const long long row_ = (m0 + (t + i * 128) / 8 < 45 ? m0 + (t + i * 128) / 8 : 44);
    float s4_ = 0.0f;
    {
      const u16* const from_ = (const u16*)in0 + row_ * 72;
      #pragma unroll 4
      for (int j_ = (t % 8) * 8; j_ < 72; j_ += 64) {
        const uint4 w_ = *(const uint4*)(from_ + j_);
        float part_ = 0.0f;
        {
          const float2 h_ = w_unpack_f16(w_.x);
          {
            const float v2_ = h_.x;
            const float v1_ = (v2_ * v2_);
            part_ += v1_;
          }
          {
            const float v4_ = h_.y;
            const float v3_ = (v4_ * v4_);
            part_ += v3_;
          }
        }
        {
          const float2 h_ = w_unpack_f16(w_.y);
          {
            const float v6_ = h_.x;
            const float v5_ = (v6_ * v6_);
            part_ += v5_;
          }
          {
            const float v8_ = h_.y;
            const float v7_ = (v8_ * v8_);
            part_ += v7_;
          }
        }
        {
          const float2 h_ = w_unpack_f16(w_.z);
          {
            const float v10_ = h_.x;
            const float v9_ = (v10_ * v10_);
            part_ += v9_;
          }
          {
            const float v12_ = h_.y;
            const float v11_ = (v12_ * v12_);
            part_ += v11_;
          }
        }
        {
          const float2 h_ = w_unpack_f16(w_.w);
          {
            const float v14_ = h_.x;
            const float v13_ = (v14_ * v14_);
            part_ += v13_;
          }
          {
            const float v16_ = h_.y;
            const float v15_ = (v16_ * v16_);
            part_ += v15_;
          }
        }
        s4_ += part_;
      }
    }
    s4_ += __uint_as_float(w_shfl_word(__float_as_uint(s4_), 1));
    s4_ += __uint_as_float(w_shfl_word(__float_as_uint(s4_), 2));
    s4_ += __uint_as_float(w_shfl_word(__float_as_uint(s4_), 4));
    const float v19_ = (s4_ * 0.013888888992369175f);
    const float v18_ = (v19_ + 9.999999747378752e-06f);
    const float v17_ = (1.0f / w_sqrt(v18_));
    row0_[i] = v17_;
  }
  w_arrived<1>();
  {
    const int i = 0;
    fix(first, sb + (u32)((i % 3) * 8192));
  }
  for (int i = 0; i < last - first; ++i) {
    role.sync();
    const u32 here = sb + (u32)((i % 3) * 8192), to = sb + (u32)((i + 2) % 3 * 8192);
    const bool more = first + i + 2 < last;
    if (more) {
      fill_w(first + i + 2, to + 4096);
      fill_a(first + i + 2, to);
    }
    w_commit();
    multiply(here, here + 4096);
    if (more) store_w(to + 4096);
    w_arrived<1>();
    if (first + i + 1 < last) fix(first + i + 1, sb + (u32)(((i + 1) % 3) * 8192));
  }
  w_arrived<0>();
  role.sync();
  // sums go through shared memory, so that neighbouring threads finish neighbouring columns
  float* const sums = (float*)sm;
  float* const mine = sums + wk * 1280;
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
      float* const at = mine + (row0 + i * 16 + (lane >> 2)) * 40 + col0 + j * 8 + (lane & 3) * 2;
      *(float2*)at = make_float2(acc[i][j][0], acc[i][j][1]);
      *(float2*)(at + 320) = make_float2(acc[i][j][2], acc[i][j][3]);
    }
  role.sync();
  for (int x = t; x < 128; x += 128) {
    const int r = x / 4, q = x % 4 * 8;
    const int m = m0 + r, n = n0 + q;
    if (m < 45 && n < 40) {
      float acc[8];
      #pragma unroll
      for (int i = 0; i < 8; ++i) { acc[i] = sums[r * 40 + q + i]; }
      const u16* const x0p = (const u16*)in3 + n;
      w_f32 x0[8];
      const uint4 x0w = *(const uint4*)(x0p);
      {
        const float2 h = w_unpack_f16(x0w.x);
        x0[0] = h.x;
        x0[1] = h.y;
      }
      {
        const float2 h = w_unpack_f16(x0w.y);
        x0[2] = h.x;
        x0[3] = h.y;
      }
      {
        const float2 h = w_unpack_f16(x0w.z);
        x0[4] = h.x;
        x0[5] = h.y;
      }
      {
        const float2 h = w_unpack_f16(x0w.w);
        x0[6] = h.x;
        x0[7] = h.y;
      }
      const w_f32 e1_0 = (acc[0] + x0[0]);
      const w_f32 e1_1 = (acc[1] + x0[1]);
      const w_f32 e1_2 = (acc[2] + x0[2]);
      const w_f32 e1_3 = (acc[3] + x0[3]);
      const w_f32 e1_4 = (acc[4] + x0[4]);
      const w_f32 e1_5 = (acc[5] + x0[5]);
      const w_f32 e1_6 = (acc[6] + x0[6]);
      const w_f32 e1_7 = (acc[7] + x0[7]);
      u16* const y0 = (u16*)out0 + (m * 40 + n);
      *(uint4*)(y0) = make_uint4(w_narrow2_f16(e1_0, e1_1), w_narrow2_f16(e1_2, e1_3), w_narrow2_f16(e1_4, e1_5),
          w_narrow2_f16(e1_6, e1_7));
    }
  }
}
extern "C" __global__ void k_pack(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 8192u) return;
  // which element of which swizzled tile this thread fills
  const int e = i % 8, place = i / 8 % 8, row = i / 64 % 32;
  const int tile = i / 2048, kt = tile % 2, nt = tile / 2 % 2;
  const int g = tile / 4;
  const int k = kt * 64 + (place ^ (row & 7)) * 8 + e, n = nt * 32 + row;
  const int c = k % 72, tap = k / 72, kh = tap, kw = 0;
  u16 v = 0;
  if (k < 72 && n < 40) v = ((const u16*)w)[n + c * 40];
  ((u16*)pk)[i] = v;
}
