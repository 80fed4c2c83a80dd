// test_templates CASES batched, transposed
// {"generator": "cuda", "params": [["blocks", 0], ["bm", 64], ["bn", 32], ["box", [1, 1, 64]], ["fields", 0], ["groups", 1], ["panel", 64], ["resident", 2], ["split", 1], ["stages", 2], ["template", "tma"], ["turns", false], ["unit", 1]]}
// k: (9, 1, 1) x (160, 1, 1), 24624 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
// weft_cuda_tma.h
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
extern "C" __global__ void __launch_bounds__(160, 2) k(const __grid_constant__ w_map ma,
    const __grid_constant__ w_map mw, const void* __restrict__ in0, const void* __restrict__ in1,
    void* __restrict__ out0) {
  static constexpr w_solo role{};
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
      w_map_prefetch(&mw);
    }
    // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
    __syncwarp();
    role.pdl_wait();
    role.pdl_trigger();
    if (t == 128) {
      u32 it = 0;
      #pragma unroll 1
      for (int tile = role.block_x(); tile < 9; tile += role.blocks_x()) {
        const int z = tile / 3, r = tile % 3;
        const int tm = r / 3, tn = r % 3;
        const int g = z / 3, b = z % 3, n0 = tn * 32;
        const int i0 = 0, i1 = 0, i2 = tm;
        (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;
        // the parity of a slot's phase flips whenever the ring comes round
        #pragma unroll 1
        for (int st = first; st < last; ++st, ++it) {
          const int kb = st;
          (void)kb;
          const u32 slot = it % 2, bar = sb + FULL + 8 * slot;
          {
            w_bar_wait(sb + EMPTY + 8 * slot, it / 2 & 1 ^ 1);
            w_bar_expect(bar, 12288u);
            const u32 to = sb + RING + slot * STAGE + 8192;
            {
              const int c = kb * 64;
              w_tma(&mw, to, bar, c, n0, b % 3);
            }
          }
          const u32 to = sb + slot * STAGE;
          {
            const int q = kb;
            (void)q;
            const int c = 0;
            w_tma(&ma, to, bar, c, i0, b % 3);
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
    for (int tile = role.block_x(); tile < 9; tile += role.blocks_x()) {
      const int z = tile / 3, r = tile % 3;
      const int tm = r / 3, tn = r % 3;
      const int g = z / 3, b = z % 3, n0 = tn * 32;
      const int i0 = 0, i1 = 0, i2 = tm;
      (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;
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
        const int m = i0 + r < 50 ? i0 + r : -1;
        u32 x[4];
        #pragma unroll
        for (int c = 0; c < 4; ++c)
          x[c] = w_narrow2_f16(acc[i][(4 * j + c) * 4 + 2 * h], acc[i][(4 * j + c) * 4 + 2 * h + 1]);
        // each of four neighbouring lanes has a word of every 8 columns; behind this, lane q has all of the q-th 8
        #pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2)
          #pragma unroll
          for (int c = 0; c < 4; ++c)
            if (!(c & bit)) {
              const bool upper = lane & bit;
              const u32 got = w_shfl_word(upper ? x[c] : x[c + bit], bit);
              if (upper) x[c] = got;
              else x[c + bit] = got;
            }
        {
          const int n = n8;
          if (m >= 0 && n < 72) {
            u16* const y0 = (u16*)out0 + (m * 72 + b * 3600 + n);
            *(uint4*)(y0) = make_uint4(x[0], x[1], x[2], x[3]);
          }
        }
      }
    }
  }
}
