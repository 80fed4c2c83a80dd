// test_normed LEAVING warpgroups
// {"generator": "cuda", "params": [["bk", 64], ["bm", 64], ["bn", 32], ["cluster", false], ["group", true], ["split", 1], ["stages", 4], ["template", "wgmma"], ["wk", 1], ["wm", 64], ["wn", 32]]}
// k_pack: (48, 1, 1) x (256, 1, 1), 0 bytes
// k: (6, 1, 1) x (128, 1, 1), 49168 bytes
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
// `x` of the lane whose number differs in `bit`, among `count` neighbours that are here
#ifndef W_EMULATED
W_FN float w_few(float x, int bit, int count, int lane) {
  const u32 who = count == 32 ? 0xffffffffu : ((1u << count) - 1u) << (lane & -count);
  return __uint_as_float(__shfl_xor_sync(who, __float_as_uint(x), bit));
}
#endif
extern "C" __global__ void __launch_bounds__(128) k(const void* __restrict__ in0, const void* __restrict__ in2,
    const void* __restrict__ pk, void* __restrict__ out0, void* __restrict__ means, void* __restrict__ spreads) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { TABLES = 49152, FLAG = 49152 };
  const u32 sb = w_shared(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int tn = role.block_x() % 3, m0 = role.block_x() / 3 * 64, n0 = tn * 32;
  const int g = role.block_z(), b = 0;
  (void)g; (void)b; (void)n0; (void)lane;
  const u16* const A = (const u16*)in0;
  const u16* const W = (const u16*)pk + ((long long)g * 3 + tn) * 4096;
  const int first = role.block_y() * 2, last = (role.block_y() + 1) * 2;
  int ao[4];
  _Pragma("unroll")
  for (int i = 0; i < 4; ++i) {
    const int x = t + i * 128;
    {
      const int m = m0 + x / 8;
      ao[i] = m < 70 ? m * 96 : -1;
    }
  }
  auto fill_a = [&](int kb, u32 to) {
    const int k = kb * 64 + t % 8 * 8;
    const u32 n16 = (k < 96 ? 16u : 0u);
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
  if (t < 2) {
    const int n = n0 + t * 64;
    w_prefetch((const u16*)in2 + (n < 96 ? n : 95));
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
  // multistage pipeline: copies run ahead of products, one barrier for each k-tile
  #pragma unroll 1
  for (int i = 0; i < last - first; ++i) {
    w_arrived<1>();
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
    if (more) {
      store_a(to);
      store_w(to + 8192);
    }
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
    if (m < 70) {
      float acc[8];
      #pragma unroll
      for (int i = 0; i < 8; ++i) { acc[i] = sums[r * 40 + q + i]; }
      const u16* const x0p = (const u16*)in2 + n;
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
      u16* const y0 = (u16*)out0 + (m * 96 + n);
      *(uint4*)(y0) = make_uint4(w_narrow2_f16(e1_0, e1_1), w_narrow2_f16(e1_2, e1_3), w_narrow2_f16(e1_4, e1_5),
          w_narrow2_f16(e1_6, e1_7));
      float p_[8];
      {
        const float2 h_ = w_unpack_f16(w_narrow2_f16(e1_0, e1_1));
        p_[0] = h_.x;
        p_[1] = h_.y;
      }
      {
        const float2 h_ = w_unpack_f16(w_narrow2_f16(e1_2, e1_3));
        p_[2] = h_.x;
        p_[3] = h_.y;
      }
      {
        const float2 h_ = w_unpack_f16(w_narrow2_f16(e1_4, e1_5));
        p_[4] = h_.x;
        p_[5] = h_.y;
      }
      {
        const float2 h_ = w_unpack_f16(w_narrow2_f16(e1_6, e1_7));
        p_[6] = h_.x;
        p_[7] = h_.y;
      }
      float mean_ = (((p_[0] + p_[1]) + (p_[2] + p_[3])) + ((p_[4] + p_[5]) + (p_[6] + p_[7]))) * 0.125f;
      p_[0] -= mean_;
      p_[1] -= mean_;
      p_[2] -= mean_;
      p_[3] -= mean_;
      p_[4] -= mean_;
      p_[5] -= mean_;
      p_[6] -= mean_;
      p_[7] -= mean_;
      float spread_ = (((p_[0] * p_[0] + p_[1] * p_[1]) + (p_[2] * p_[2] + p_[3] * p_[3]))
          + ((p_[4] * p_[4] + p_[5] * p_[5]) + (p_[6] * p_[6] + p_[7] * p_[7])));
      {
        const float other = w_few(mean_, 1, 4, lane), far = mean_ - other;
        spread_ += w_few(spread_, 1, 4, lane);
        spread_ += far * far * 4.0f;
        mean_ = (mean_ + other) * 0.5f;
      }
      {
        const float other = w_few(mean_, 2, 4, lane), far = mean_ - other;
        spread_ += w_few(spread_, 2, 4, lane);
        spread_ += far * far * 8.0f;
        mean_ = (mean_ + other) * 0.5f;
      }
      if ((lane & 3) == 0) {
        ((float*)means)[(long long)m * 3 + n / 32] = mean_;
        ((float*)spreads)[(long long)m * 3 + n / 32] = spread_;
      }
    }
  }
}
extern "C" __global__ void k_pack(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 12288u) return;
  // which element of which swizzled tile this thread fills
  const int e = i % 8, place = i / 8 % 8, row = i / 64 % 32;
  const int tile = i / 2048, kt = tile % 2, nt = tile / 2 % 3;
  const int g = tile / 6;
  const int k = kt * 64 + (place ^ (row & 7)) * 8 + e, n = nt * 32 + row;
  const int c = k % 96, tap = k / 96, kh = tap, kw = 0;
  u16 v = 0;
  if (k < 96 && n < 96) v = ((const u16*)w)[n + c * 96];
  ((u16*)pk)[i] = v;
}
