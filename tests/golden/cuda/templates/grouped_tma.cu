// test_grouped CASES q, k and v of one operand
// {"generator": "cuda", "params": [["blocks", [0, 0, 0]], ["bm", [64, 64, 64]], ["bn", [32, 32, 32]], ["box", [1, 1, 64, 1, 1, 64, 1, 1, 64]], ["groups", [1, 1, 1]], ["panel", [64, 64, 64]], ["resident", [1, 1, 1]], ["split", [1, 1, 1]], ["stages", [2, 2, 2]], ["template", "grouped_tma"], ["turns", [0, 0, 0]]]}
// k_0_pack: (16, 1, 1) x (256, 1, 1), 0 bytes
// k_0_pack: (16, 1, 1) x (256, 1, 1), 0 bytes
// k_0_pack: (16, 1, 1) x (256, 1, 1), 0 bytes
// k: (6, 1, 1) x (160, 1, 1), 24624 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
// weft_cuda_tma.h
namespace m0 {
#ifndef W_EMULATED
  W_FN void w_product_f16_00(float (&d)[16], u64 a, u64 b, int add) {
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
  typedef w_beside<2u> frame;
  W_FN void member(const frame role, const w_map& ma, const void* __restrict__ in0, const void* __restrict__ in2,
      const void* __restrict__ pk, void* __restrict__ out0) {
    W_DYNAMIC(sm);
    enum { STAGE = 12288, RING = 0, FULL = RING + 24576, EMPTY = FULL + 16, TURN = EMPTY + 16 };
    const u32 sb = w_shared(sm);
    const int t = role.thread(), lane = t & 31, warp = t >> 5;
    // full barriers count TMA's bytes, empty ones the consumer warps that have read a stage
    if (t == 0) {
      for (int i = 0; i < 2; ++i) {
        w_bar_init(sb + FULL + 8 * i, 1);
        w_bar_init(sb + EMPTY + 8 * i, 4);
      }
      w_bar_init(sb + TURN, 4);
      w_bar_init(sb + TURN + 8, 4);
      w_bar_ready();
    }
    role.sync();
    const int first = 0, last = 1;
    if (warp >= 4) {
      // producer warp: one thread keeps the ring of stages full by TMA
      if (t == 128) {
        w_map_prefetch(&ma);
        // weights are constants: a first round of stages, before what earlier kernels wrote is waited for
        const int tile = role.block_x();
        const int z = tile / 2, r = tile % 2;
        const int tm = r / 2, tn = r % 2;
        const int g = z, b = 0, n0 = tn * 32;
        const int i0 = 0, i1 = 0, i2 = tm;
        (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;
        const u16* const pk_tile = (const u16*)pk + ((long long)g * 2 + tn) * 2048;
        for (u32 i = 0; i < (last - first < 2 ? (u32)(last - first) : 2u); ++i) {
          const u32 bar = sb + FULL + 8 * i;
          const u32 to = sb + RING + i * STAGE + 8192;
          const int kb = first + (int)i;
          w_bar_expect(bar, 12288u);
          w_bulk(to, pk_tile + (long long)kb * 2048, 4096u, bar);
        }
      }
      // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
      __syncwarp();
      role.pdl_wait();
      role.pdl_trigger();
      if (t == 128) {
        u32 it = 0;
        #pragma unroll 1
        for (int tile = role.block_x(); tile < 2; tile += role.blocks_x()) {
          const int z = tile / 2, r = tile % 2;
          const int tm = r / 2, tn = r % 2;
          const int g = z, b = 0, n0 = tn * 32;
          const int i0 = 0, i1 = 0, i2 = tm;
          (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;
          const u16* const pk_tile = (const u16*)pk + ((long long)g * 2 + tn) * 2048;
          // the parity of a slot's phase flips whenever the ring comes round
          #pragma unroll 1
          for (int st = first; st < last; ++st, ++it) {
            const int kb = st;
            (void)kb;
            const u32 slot = it % 2, bar = sb + FULL + 8 * slot;
            if (it >= (last - first < 2 ? (u32)(last - first) : 2u)) {
              w_bar_wait(sb + EMPTY + 8 * slot, it / 2 & 1 ^ 1);
              w_bar_expect(bar, 12288u);
              const u32 to = sb + RING + slot * STAGE + 8192;
              w_bulk(to, pk_tile + (long long)kb * 2048, 4096u, bar);
            }
            const u32 to = sb + slot * STAGE;
            {
              const int q = kb;
              (void)q;
              const int c = 0;
              w_tma(&ma, to, bar, c, i0);
            }
          }
        }
      }
    } else {
      // consumer warpgroup: wgmma from shared memory, sums in registers
      // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
      role.pdl_wait();
      role.pdl_trigger();
      const int row0 = 0;
      (void)row0;
      float acc[1][16];
      u32 it = 0;
      #pragma unroll 1
      for (int tile = role.block_x(); tile < 2; tile += role.blocks_x()) {
        const int z = tile / 2, r = tile % 2;
        const int tm = r / 2, tn = r % 2;
        const int g = z, b = 0, n0 = tn * 32;
        const int i0 = 0, i1 = 0, i2 = tm;
        (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;
        // vectors along the columns are read before the main loop
        uint4 column0[1];
        #pragma unroll
        for (int j = 0; j < 1; ++j) {
          const int n8 = n0 + j * 32 + (lane & 3) * 8, n = n8 < 48 ? n8 : 0;
          column0[j] = *(const uint4*)((const u16*)in2 + n);
        }
        // the parity of a slot's phase flips whenever the ring comes round
        #pragma unroll 1
        for (int st = first; st < last; ++st, ++it) {
          const u32 slot = it % 2, at = sb + RING + slot * STAGE;
          w_bar_wait(sb + FULL + 8 * slot, it / 2 & 1);
          // both operands by descriptors: panels whose rows are 128 bytes, swizzled as TMA has written them
          w_group_begin();
          #pragma unroll
          for (int i = 0; i < 1; ++i)
            #pragma unroll
            for (int q = 0; q < 4; ++q)
              w_product_f16_00(acc[i], w_operand_at(at + (u32)((row0 + i * 64) * 128) + (u32)(q * 32), 16, 1024, 1),
                  w_operand_at(at + 8192 + (u32)(q * 32), 16, 1024, 1), (st - first) | q);
          w_group_commit();
          // the product before this one is complete: its stage is free
          w_group_wait<1>();
          if (st > first && lane == 0) w_bar_arrive(sb + EMPTY + 8 * ((it - 1) % 2));
        }
        w_group_wait<0>();
        if (lane == 0) w_bar_arrive(sb + EMPTY + 8 * ((it - 1) % 2));
        // epilogue: a thread has 8 columns of a row at a time
        #pragma unroll
        for (int o = 0; o < 2; ++o) {
          const int h = o % 2, i = 0, j = o / 2, n8 = n0 + j * 32 + (lane & 3) * 8;
          const int r = row0 + i * 64 + (warp & 3) * 16 + h * 8 + (lane >> 2);
          const int m = i0 + r < 40 ? i0 + r : -1;
          float v[8];
          #pragma unroll
          for (int c = 0; c < 4; ++c) {
            v[2 * c] = acc[i][(4 * j + c) * 4 + 2 * h];
            v[2 * c + 1] = acc[i][(4 * j + c) * 4 + 2 * h + 1];
          }
          {
            const int n = n8;
            if (m >= 0 && n < 48) {
              const u16* const x0p = (const u16*)&column0[j];
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
              const w_f32 e1_0 = (v[0] + x0[0]);
              const w_f32 e1_1 = (v[1] + x0[1]);
              const w_f32 e1_2 = (v[2] + x0[2]);
              const w_f32 e1_3 = (v[3] + x0[3]);
              const w_f32 e1_4 = (v[4] + x0[4]);
              const w_f32 e1_5 = (v[5] + x0[5]);
              const w_f32 e1_6 = (v[6] + x0[6]);
              const w_f32 e1_7 = (v[7] + x0[7]);
              u16* const y0 = (u16*)out0 + (m % 20 * 16 + m / 20 * 960 + n / 16 * 320 + n % 16);
              *(uint4*)(y0) = make_uint4(w_narrow2_f16(e1_0, e1_1), w_narrow2_f16(e1_2, e1_3),
                  w_narrow2_f16(e1_4, e1_5), w_narrow2_f16(e1_6, e1_7));
            }
          }
        }
      }
    }
  }
}
extern "C" __global__ void k_0_pack(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  using namespace m0;
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 4096u) return;
  // rows are columns of the weights: permuted so that a thread's fragments are neighbours, swizzled as TMA would
  const int e = i % 8, place = i / 8 % 8, row = i / 64 % 32;
  const int q = 0, tile = i / 2048;
  const int nt = tile % 2, g = tile / 2;
  const int c = (place ^ (row & 7)) * 8 + e, tap = q;
  const int n = nt * 32 + row / 32 * 32 + row % 8 / 2 * 8 + row / 8 % 4 * 2 + row % 2;
  u16 v = 0;
  if (q < 1 && c < 40 && n < 48) v = ((const u16*)w)[n + c * 48];
  ((u16*)pk)[i] = v;
}
extern "C" __global__ void __launch_bounds__(160, 1) k(const __grid_constant__ w_map map0, const void* __restrict__ in0,
    const void* __restrict__ in2, const void* __restrict__ in4, const void* __restrict__ in6,
    const void* __restrict__ pk0, const void* __restrict__ pk1, const void* __restrict__ pk2, void* __restrict__ out0,
    void* __restrict__ out1, void* __restrict__ out2) {
  static constexpr w_solo role{};
  const u32 block = role.block_x();
  if (block < 6u) {
    const u32 at = block, which = at / 2u, tile = at % 2u;
    (void)which; (void)tile;
    m0::member(m0::frame(tile % 2u, 0u, 0u), map0, in0, (which == 0u ? in2 : which == 1u ? in4 : in6),
        (which == 0u ? pk0 : which == 1u ? pk1 : pk2), (which == 0u ? out0 : which == 1u ? out1 : out2));
    return;
  }
  role.pdl_wait();
  role.pdl_trigger();
}
