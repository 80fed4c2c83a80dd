// test_tma CASES stored by boxes, woven
// {"generator": "cuda", "params": [["bk", 64], ["bm", 64], ["bn", 16], ["cluster", false], ["group", true], ["split", 1], ["stages", 6], ["template", "wgmma"], ["wk", 1], ["wm", 64], ["wn", 16]]}
// k: (30, 1, 1) x (128, 1, 1), 61456 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
#ifndef W_EMULATED
W_FN void w_wgmma_f16(float (&d)[8], u64 a, u64 b, int add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16"
      " {%0, %1, %2, %3, %4, %5, %6, %7},"
      " %8, %9, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) : "l"(a), "l"(b),
      "r"(add));
#endif
}
#endif
extern "C" __global__ void __launch_bounds__(128) k(const void* __restrict__ in0, const void* __restrict__ in1,
    void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { TABLES = 61440, FLAG = 61440 };
  const u32 sb = w_shared(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int tn = role.block_x() % 6, m0 = role.block_x() / 6 * 64, n0 = tn * 16;
  const int g = role.block_z(), b = 0;
  (void)g; (void)b; (void)n0; (void)lane;
  const u16* const A = (const u16*)in0;
  const u16* const W = (const u16*)in1;
  const int first = role.block_y() * 3, last = (role.block_y() + 1) * 3;
  int ao[4];
  _Pragma("unroll")
  for (int i = 0; i < 4; ++i) {
    const int x = t + i * 128;
    {
      const int m = m0 + x / 8;
      ao[i] = m < 300 ? m * 136 : -1;
    }
  }
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
    const int k = kb * 64 + t % 8 * 8;
    const u32 n16 = (k < 136 ? 16u : 0u);
    _Pragma("unroll")
    for (int i = 0; i < 1; ++i) {
      const int x = t + i * 128;
      {
        const int n = n0 + x / 8;
        const bool ok = n16 != 0;
        w_copy16(to + (x / 8 * 8 + ((t % 8) ^ ((x / 8) & 7))) * 16, (ok ? W + n * 136 + k : W), (ok ? n16 : 0u));
      }
    }
  };
  auto store_a = [&](u32 to) { (void)to; };
  auto store_w = [&](u32 to) { (void)to; };
  const int wk = 0, row0 = (warp >> 2) * 64, col0 = 0;
  (void)wk;
  float acc[1][8];
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 8; ++j) acc[i][j] = 0.0f;
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
  // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
  role.pdl_wait();
  role.pdl_trigger();
  for (int i = 0; i < 4; ++i) {
    if (first + i < last) {
      fill_w(first + i, sb + (u32)((i % 6) * 10240) + 8192);
      store_w(sb + (u32)((i % 6) * 10240) + 8192);
      fill_a(first + i, sb + (u32)((i % 6) * 10240));
      store_a(sb + (u32)((i % 6) * 10240));
    }
    w_commit();
  }
  // multistage pipeline: copies run ahead of products, one barrier for each k-tile
  #pragma unroll 1
  for (int i = 0; i < last - first; ++i) {
    w_arrived<3>();
    w_async_fence();
    w_group_wait<1>();
    role.sync();
    const u32 here = sb + (u32)((i % 6) * 10240), to = sb + (u32)((i + 4) % 6 * 10240);
    const bool more = first + i + 4 < last;
    multiply(here, here + 8192, i);
    if (more) {
      fill_w(first + i + 4, to + 8192);
      fill_a(first + i + 4, to);
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
    for (int j = 0; j < 2; ++j) {
      float* const at = sums + (row0 + i * 64 + (warp & 3) * 16 + (lane >> 2)) * 24 + col0 + j * 8 + (lane & 3) * 2;
      *(float2*)at = make_float2(acc[i][4 * j], acc[i][4 * j + 1]);
      *(float2*)(at + 192) = make_float2(acc[i][4 * j + 2], acc[i][4 * j + 3]);
    }
  role.sync();
  for (int x = t; x < 128; x += 128) {
    const int r = x / 2, q = x % 2 * 8;
    const int m = m0 + r, n = n0 + q;
    if (m < 300) {
      float acc[8];
      #pragma unroll
      for (int i = 0; i < 8; ++i) { acc[i] = sums[r * 24 + q + i]; }
      u16* const y0 = (u16*)out0 + (m * 96 + n);
      *(uint4*)(y0) = make_uint4(w_narrow2_f16(acc[0], acc[1]), w_narrow2_f16(acc[2], acc[3]),
          w_narrow2_f16(acc[4], acc[5]), w_narrow2_f16(acc[6], acc[7]));
    }
  }
}
