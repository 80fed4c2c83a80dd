// test_grouped CASES q, k and v of one operand
// {"generator": "cuda", "params": [["bk", 32], ["bm", 32], ["bn", 32], ["cluster", 1], ["group", false], ["splits", [1, 1, 1]], ["stages", 3], ["template", "grouped_simt"], ["wk", 1], ["wm", 16], ["wn", 16]]}
// k_0_pack: (16, 1, 1) x (256, 1, 1), 0 bytes
// k_0_pack: (16, 1, 1) x (256, 1, 1), 0 bytes
// k_0_pack: (16, 1, 1) x (256, 1, 1), 0 bytes
// k: (12, 1, 1) x (128, 1, 1), 12304 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
namespace m0 {
  typedef w_beside<4u> frame;
  W_FN void member(const frame role, const void* __restrict__ in0, const void* __restrict__ in2,
      const void* __restrict__ pk, void* __restrict__ out0) {
    W_DYNAMIC(sm);
    enum { TABLES = 12288, FLAG = 12288 };
    const u32 sb = w_shared(sm);
    const int t = role.thread(), lane = t & 31, warp = t >> 5;
    const int tn = role.block_x() % 2, m0 = role.block_x() / 2 * 32, n0 = tn * 32;
    const int g = role.block_z(), b = 0;
    (void)g; (void)b; (void)n0; (void)lane;
    const u16* const A = (const u16*)in0;
    const u16* const W = (const u16*)pk + ((long long)g * 2 + tn) * 2048;
    const int first = role.block_y() * 2, last = (role.block_y() + 1) * 2;
    int ao[1];
    _Pragma("unroll")
    for (int i = 0; i < 1; ++i) {
      const int x = t + i * 128;
      {
        const int m = m0 + x / 4;
        ao[i] = m < 40 ? m * 40 : -1;
      }
    }
    auto fill_a = [&](int kb, u32 to) {
      const int k = kb * 32 + t % 4 * 8;
      const u32 n16 = (k < 40 ? 16u : 0u);
      _Pragma("unroll")
      for (int i = 0; i < 1; ++i) {
        const int x = t + i * 128;
        {
          w_copy16(to + (x / 4 * 4 + ((t % 4) ^ ((x / 4) >> 1 & 3))) * 16, (ao[i] >= 0 && n16 != 0 ? A + ao[i] + k : A),
              (ao[i] >= 0 ? n16 : 0u));
        }
      }
    };
    auto fill_w = [&](int kb, u32 to) {
      const char* const from = (const char*)(W + kb * 1024);
      _Pragma("unroll")
      for (int i = 0; i < 1; ++i) {
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
      for (int q = 0; q < 2; ++q) {
        const int kk = wk * 2 + q;
        u32 fa[1][4], fw[1][4];
        #pragma unroll
        for (int i = 0; i < 1; ++i)
          w_matrices(fa[i], a + ((row0 + i * 16 + (lane & 15)) * 4
              + ((kk * 2 + (lane >> 4)) ^ ((row0 + i * 16 + (lane & 15)) >> 1 & 3))) * 16);
        #pragma unroll
        for (int j = 0; j < 1; ++j)
          w_matrices(fw[j], w + ((col0 + j * 16 + (lane & 7) + ((lane >> 4) << 3)) * 4
              + ((kk * 2 + ((lane >> 3) & 1)) ^ ((col0 + j * 16 + (lane & 7) + ((lane >> 4) << 3)) >> 1 & 3))) * 16);
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
      if (first + i < last) fill_w(first + i, sb + (u32)((i % 3) * 4096) + 2048);
    if (t < 2) {
      const int n = n0 + t * 64;
      w_prefetch((const u16*)in2 + g * 16 + (n < 48 ? n : 47));
    }
    // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
    role.pdl_wait();
    role.pdl_trigger();
    for (int i = 0; i < 2; ++i) {
      if (first + i < last) {
        fill_a(first + i, sb + (u32)((i % 3) * 4096));
        store_a(sb + (u32)((i % 3) * 4096));
      }
      w_commit();
    }
    // multistage pipeline: copies run ahead of products, one barrier for each k-tile
    for (int i = 0; i < last - first; ++i) {
      w_arrived<1>();
      role.sync();
      const u32 here = sb + (u32)((i % 3) * 4096), to = sb + (u32)((i + 2) % 3 * 4096);
      const bool more = first + i + 2 < last;
      if (more) {
        fill_w(first + i + 2, to + 2048);
        fill_a(first + i + 2, to);
      }
      w_commit();
      multiply(here, here + 2048);
      if (more) {
        store_a(to);
        store_w(to + 2048);
      }
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
      if (m < 40 && n < 48) {
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
        u16* const y0 = (u16*)out0 + (m % 20 * 16 + m / 20 * 960 + n / 16 * 320 + n % 16);
        *(uint4*)(y0) = make_uint4(w_narrow2_f16(e1_0, e1_1), w_narrow2_f16(e1_2, e1_3), w_narrow2_f16(e1_4, e1_5),
            w_narrow2_f16(e1_6, e1_7));
      }
    }
  }
}
extern "C" __global__ void k_0_pack(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  using namespace m0;
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 4096u) return;
  // which element of which swizzled tile this thread fills
  const int e = i % 8, place = i / 8 % 4, row = i / 32 % 32;
  const int tile = i / 1024, kt = tile % 2, nt = tile / 2 % 2;
  const int g = tile / 4;
  const int k = kt * 32 + (place ^ (row >> 1 & 3)) * 8 + e, n = nt * 32 + row;
  const int c = k % 40, tap = k / 40, kh = tap, kw = 0;
  u16 v = 0;
  if (k < 40 && n < 48) v = ((const u16*)w)[n + c * 48];
  ((u16*)pk)[i] = v;
}
extern "C" __global__ void __launch_bounds__(128) k(const void* __restrict__ in0, const void* __restrict__ in2,
    const void* __restrict__ in4, const void* __restrict__ in6, const void* __restrict__ pk0,
    const void* __restrict__ pk1, const void* __restrict__ pk2, void* __restrict__ out0, void* __restrict__ out1,
    void* __restrict__ out2) {
  static constexpr w_solo role{};
  const u32 block = role.block_x();
  if (block < 12u) {
    const u32 at = block, which = at / 4u, tile = at % 4u;
    (void)which; (void)tile;
    m0::member(m0::frame(tile % 4u, 0u, 0u), in0, (which == 0u ? in2 : which == 1u ? in4 : in6),
        (which == 0u ? pk0 : which == 1u ? pk1 : pk2), (which == 0u ? out0 : which == 1u ? out1 : out2));
    return;
  }
  role.pdl_wait();
  role.pdl_trigger();
}
