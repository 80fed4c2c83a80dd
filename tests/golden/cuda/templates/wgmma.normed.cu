// test_normed NORMED own, warpgroups
// {"generator": "cuda", "params": [["bk", 64], ["bm", 64], ["bn", 32], ["cluster", false], ["group", true], ["split", 1], ["stages", 4], ["template", "wgmma"], ["wk", 1], ["wm", 64], ["wn", 32]]}
// k_pack: (48, 1, 1) x (256, 1, 1), 0 bytes
// k: (4, 1, 1) x (128, 1, 1), 50704 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
#ifndef W_EMULATED
W_FN void w_wgmma_f16(float (&d)[16], u64 a, u64 b, int add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15},"
      " %16, %17, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]) : "l"(a), "l"(b),
      "r"(add));
#endif
}
#endif
// a store without a branch
#ifndef W_EMULATED
W_FN void w_store_if(void* p, uint4 v, bool in) {
  asm volatile("{ .reg .pred q; setp.ne.b32 q, %5, 0; @q st.global.v4.u32 [%0], {%1, %2, %3, %4}; }"
      ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((int)in) : "memory");
}
#endif
extern "C" __global__ void __launch_bounds__(128) k(const void* __restrict__ in0, const void* __restrict__ in4,
    const void* __restrict__ in1, const void* __restrict__ in2, const void* __restrict__ pk, void* __restrict__ out0,
    void* __restrict__ normed) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { TABLES = 49152, FLAG = 50688 };
  const u32 sb = w_shared(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int tn = role.block_x() % 2, m0 = role.block_x() / 2 * 64, n0 = tn * 32;
  const int g = role.block_z(), b = 0;
  (void)g; (void)b; (void)n0; (void)lane;
  const u16* const A = (const u16*)in0;
  const u16* const W = (const u16*)pk + ((long long)g * 2 + tn) * 6144;
  const int first = role.block_y() * 3, last = (role.block_y() + 1) * 3;
  for (int i = t; i < 192; i += 128)
    ((float*)(sm + TABLES))[i] = i < 136 ? w_unpack_f16(*((const u16*)in1 + i)).x : 0.0f;
  for (int i = t; i < 192; i += 128)
    ((float*)(sm + TABLES))[192 + i] = i < 136 ? w_unpack_f16(*((const u16*)in2 + i)).x : 0.0f;
  int ao[4];
  _Pragma("unroll")
  for (int i = 0; i < 4; ++i) {
    const int x = t + i * 128;
    {
      const int m = m0 + x / 8;
      ao[i] = m < 70 ? m * 136 : -1;
    }
  }
  float row0_[4];
  float row1_[4];
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
    float c1_[8];
    {
      const float4 h_ = *(const float4*)((float*)(sm + TABLES) + 192 + k);
      c1_[0] = h_.x;
      c1_[1] = h_.y;
      c1_[2] = h_.z;
      c1_[3] = h_.w;
    }
    {
      const float4 h_ = *(const float4*)((float*)(sm + TABLES) + 196 + k);
      c1_[4] = h_.x;
      c1_[5] = h_.y;
      c1_[6] = h_.z;
      c1_[7] = h_.w;
    }
    _Pragma("unroll")
    for (int i = 0; i < 4; ++i) {
      const int x = t + i * 128;
      {
        const u32 at = to + (x / 8 * 8 + ((t % 8) ^ ((x / 8) & 7))) * 16;
        uint4* const here_ = (uint4*)(sm + (at - sb));
        uint4 w_ = *here_;
        {
          const float2 h_ = w_unpack_f16(w_.x);
          const float e0_3_ = h_.x;
          const float e0_9_ = (e0_3_ - row0_[i]);
          const float e0_18_ = (e0_9_ * row1_[i]);
          const float e0_21_ = (e0_18_ * c0_[0]);
          const float e0_24_ = (e0_21_ + c1_[0]);
          const float e1_3_ = h_.y;
          const float e1_9_ = (e1_3_ - row0_[i]);
          const float e1_18_ = (e1_9_ * row1_[i]);
          const float e1_21_ = (e1_18_ * c0_[1]);
          const float e1_24_ = (e1_21_ + c1_[1]);
          w_.x = w_narrow2_f16(e0_24_, e1_24_);
        }
        {
          const float2 h_ = w_unpack_f16(w_.y);
          const float e0_3_ = h_.x;
          const float e0_9_ = (e0_3_ - row0_[i]);
          const float e0_18_ = (e0_9_ * row1_[i]);
          const float e0_21_ = (e0_18_ * c0_[2]);
          const float e0_24_ = (e0_21_ + c1_[2]);
          const float e1_3_ = h_.y;
          const float e1_9_ = (e1_3_ - row0_[i]);
          const float e1_18_ = (e1_9_ * row1_[i]);
          const float e1_21_ = (e1_18_ * c0_[3]);
          const float e1_24_ = (e1_21_ + c1_[3]);
          w_.y = w_narrow2_f16(e0_24_, e1_24_);
        }
        {
          const float2 h_ = w_unpack_f16(w_.z);
          const float e0_3_ = h_.x;
          const float e0_9_ = (e0_3_ - row0_[i]);
          const float e0_18_ = (e0_9_ * row1_[i]);
          const float e0_21_ = (e0_18_ * c0_[4]);
          const float e0_24_ = (e0_21_ + c1_[4]);
          const float e1_3_ = h_.y;
          const float e1_9_ = (e1_3_ - row0_[i]);
          const float e1_18_ = (e1_9_ * row1_[i]);
          const float e1_21_ = (e1_18_ * c0_[5]);
          const float e1_24_ = (e1_21_ + c1_[5]);
          w_.z = w_narrow2_f16(e0_24_, e1_24_);
        }
        {
          const float2 h_ = w_unpack_f16(w_.w);
          const float e0_3_ = h_.x;
          const float e0_9_ = (e0_3_ - row0_[i]);
          const float e0_18_ = (e0_9_ * row1_[i]);
          const float e0_21_ = (e0_18_ * c0_[6]);
          const float e0_24_ = (e0_21_ + c1_[6]);
          const float e1_3_ = h_.y;
          const float e1_9_ = (e1_3_ - row0_[i]);
          const float e1_18_ = (e1_9_ * row1_[i]);
          const float e1_21_ = (e1_18_ * c0_[7]);
          const float e1_24_ = (e1_21_ + c1_[7]);
          w_.w = w_narrow2_f16(e0_24_, e1_24_);
        }
        if (k >= 136) w_ = make_uint4(0, 0, 0, 0);
        *here_ = w_;
        const int m = m0 + x / 8;
        w_store_if((u16*)normed + (long long)m * 136 + k, w_, tn == 0 && m < 70 && k < 136);
      }
    }
  };

  auto fill_a = [&](int kb, u32 to) {
    const int k = kb * 64 + t % 8 * 8;
    const u32 n16 = (k < 136 ? 16u : 0u);
    _Pragma("unroll")
    for (int i = 0; i < 4; ++i) {
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
  const int wk = 0, row0 = (warp >> 2) * 64, col0 = 0;
  (void)wk;
  float acc[1][16];
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 16; ++j) acc[i][j] = 0.0f;
  auto multiply = [&](u32 a, u32 w, int add) {
    w_group_begin();
    #pragma unroll
    for (int i = 0; i < 1; ++i)
      #pragma unroll
      for (int q = 0; q < 4; ++q)
        w_wgmma_f16(acc[i], w_descriptor(a + (u32)((row0 + i * 64) * 128 + q * 32)),
            w_descriptor(w + (u32)(col0 * 128 + q * 32)), add | q);
    w_group_commit();
  };
  for (int i = 0; i < 2; ++i)
    if (first + i < last) fill_w(first + i, sb + (u32)((i % 4) * 12288) + 8192);
  role.sync();
  if (t < 2) {
    const int n = n0 + t * 64;
    w_prefetch((const u16*)in4 + (n < 40 ? n : 39));
  }
  // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
  role.pdl_wait();
  role.pdl_trigger();
  for (int i = 0; i < 2; ++i) {
    if (first + i < last) {
      fill_a(first + i, sb + (u32)((i % 4) * 12288));
      store_a(sb + (u32)((i % 4) * 12288));
    }
    w_commit();
  }
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const long long row_ = (m0 + (t + i * 128) / 8 < 70 ? m0 + (t + i * 128) / 8 : 69);
    float s4_ = 0.0f;
    {
      const u16* const from_ = (const u16*)in0 + row_ * 136;
      #pragma unroll 4
      for (int j_ = (t % 8) * 8; j_ < 136; j_ += 64) {
        const uint4 w_ = *(const uint4*)(from_ + j_);
        float part_ = 0.0f;
        {
          const float2 h_ = w_unpack_f16(w_.x);
          {
            const float v1_ = h_.x;
            part_ += v1_;
          }
          {
            const float v2_ = h_.y;
            part_ += v2_;
          }
        }
        {
          const float2 h_ = w_unpack_f16(w_.y);
          {
            const float v3_ = h_.x;
            part_ += v3_;
          }
          {
            const float v4_ = h_.y;
            part_ += v4_;
          }
        }
        {
          const float2 h_ = w_unpack_f16(w_.z);
          {
            const float v5_ = h_.x;
            part_ += v5_;
          }
          {
            const float v6_ = h_.y;
            part_ += v6_;
          }
        }
        {
          const float2 h_ = w_unpack_f16(w_.w);
          {
            const float v7_ = h_.x;
            part_ += v7_;
          }
          {
            const float v8_ = h_.y;
            part_ += v8_;
          }
        }
        s4_ += part_;
      }
    }
    s4_ += __uint_as_float(w_shfl_word(__float_as_uint(s4_), 1));
    s4_ += __uint_as_float(w_shfl_word(__float_as_uint(s4_), 2));
    s4_ += __uint_as_float(w_shfl_word(__float_as_uint(s4_), 4));
    float s11_ = 0.0f;
    {
      const u16* const from_ = (const u16*)in0 + row_ * 136;
      #pragma unroll 4
      for (int j_ = (t % 8) * 8; j_ < 136; j_ += 64) {
        const uint4 w_ = *(const uint4*)(from_ + j_);
        float part_ = 0.0f;
        {
          const float2 h_ = w_unpack_f16(w_.x);
          {
            const float v11_ = h_.x;
            const float v12_ = (s4_ * 0.007352941203862429f);
            const float v10_ = (v11_ - v12_);
            const float v9_ = (v10_ * v10_);
            part_ += v9_;
          }
          {
            const float v15_ = h_.y;
            const float v16_ = (s4_ * 0.007352941203862429f);
            const float v14_ = (v15_ - v16_);
            const float v13_ = (v14_ * v14_);
            part_ += v13_;
          }
        }
        {
          const float2 h_ = w_unpack_f16(w_.y);
          {
            const float v19_ = h_.x;
            const float v20_ = (s4_ * 0.007352941203862429f);
            const float v18_ = (v19_ - v20_);
            const float v17_ = (v18_ * v18_);
            part_ += v17_;
          }
          {
            const float v23_ = h_.y;
            const float v24_ = (s4_ * 0.007352941203862429f);
            const float v22_ = (v23_ - v24_);
            const float v21_ = (v22_ * v22_);
            part_ += v21_;
          }
        }
        {
          const float2 h_ = w_unpack_f16(w_.z);
          {
            const float v27_ = h_.x;
            const float v28_ = (s4_ * 0.007352941203862429f);
            const float v26_ = (v27_ - v28_);
            const float v25_ = (v26_ * v26_);
            part_ += v25_;
          }
          {
            const float v31_ = h_.y;
            const float v32_ = (s4_ * 0.007352941203862429f);
            const float v30_ = (v31_ - v32_);
            const float v29_ = (v30_ * v30_);
            part_ += v29_;
          }
        }
        {
          const float2 h_ = w_unpack_f16(w_.w);
          {
            const float v35_ = h_.x;
            const float v36_ = (s4_ * 0.007352941203862429f);
            const float v34_ = (v35_ - v36_);
            const float v33_ = (v34_ * v34_);
            part_ += v33_;
          }
          {
            const float v39_ = h_.y;
            const float v40_ = (s4_ * 0.007352941203862429f);
            const float v38_ = (v39_ - v40_);
            const float v37_ = (v38_ * v38_);
            part_ += v37_;
          }
        }
        s11_ += part_;
      }
    }
    s11_ += __uint_as_float(w_shfl_word(__float_as_uint(s11_), 1));
    s11_ += __uint_as_float(w_shfl_word(__float_as_uint(s11_), 2));
    s11_ += __uint_as_float(w_shfl_word(__float_as_uint(s11_), 4));
    const float v41_ = (s4_ * 0.007352941203862429f);
    row0_[i] = v41_;
    const float v44_ = (s11_ * 0.007352941203862429f);
    const float v43_ = (v44_ + 9.999999747378752e-06f);
    const float v42_ = (1.0f / w_sqrt(v43_));
    row1_[i] = v42_;
  }
  w_arrived<1>();
  {
    const int i = 0;
    fix(first, sb + (u32)((i % 4) * 12288));
  }
  #pragma unroll 1
  for (int i = 0; i < last - first; ++i) {
    w_async_fence();
    w_group_wait<1>();
    role.sync();
    const u32 here = sb + (u32)((i % 4) * 12288), to = sb + (u32)((i + 2) % 4 * 12288);
    const bool more = first + i + 2 < last;
    multiply(here, here + 8192, i);
    if (more) {
      fill_w(first + i + 2, to + 8192);
      fill_a(first + i + 2, to);
    }
    w_commit();
    if (more) store_w(to + 8192);
    w_arrived<1>();
    if (first + i + 1 < last) fix(first + i + 1, sb + (u32)(((i + 1) % 4) * 12288));
  }
  w_group_wait<0>();
  w_arrived<0>();
  role.sync();
  // sums go through shared memory, so that neighbouring threads finish neighbouring columns
  float* const sums = (float*)sm;
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      float* const at = sums + (row0 + i * 64 + (warp & 3) * 16 + (lane >> 2)) * 40 + col0 + j * 8 + (lane & 3) * 2;
      *(float2*)at = make_float2(acc[i][4 * j], acc[i][4 * j + 1]);
      *(float2*)(at + 320) = make_float2(acc[i][4 * j + 2], acc[i][4 * j + 3]);
    }
  role.sync();
  for (int x = t; x < 256; x += 128) {
    const int r = x / 4, q = x % 4 * 8;
    const int m = m0 + r, n = n0 + q;
    if (m < 70 && n < 40) {
      float acc[8];
      #pragma unroll
      for (int i = 0; i < 8; ++i) { acc[i] = sums[r * 40 + q + i]; }
      const u16* const x0p = (const u16*)in4 + n;
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
  if (i >= 12288u) return;
  // which element of which swizzled tile this thread fills
  const int e = i % 8, place = i / 8 % 8, row = i / 64 % 32;
  const int tile = i / 2048, kt = tile % 3, nt = tile / 3 % 2;
  const int g = tile / 6;
  const int k = kt * 64 + (place ^ (row & 7)) * 8 + e, n = nt * 32 + row;
  const int c = k % 136, tap = k / 136, kh = tap, kw = 0;
  u16 v = 0;
  if (k < 136 && n < 40) v = ((const u16*)w)[n + c * 40];
  ((u16*)pk)[i] = v;
}
