// test_swap CASES batch, nn, split
// {"generator": "cuda", "params": [["bm", 16], ["bn", 64], ["split", 1], ["stages", 5], ["template", "swap"]]}
// k: (6, 1, 1) x (160, 1, 1), 51280 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
// weft_cuda_tma.h
#ifndef W_EMULATED
W_FN void w_product_f16_10(float (&d)[8], u64 a, u64 b, int add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16"
      " {%0, %1, %2, %3, %4, %5, %6, %7},"
      " %8, %9, p, 1, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) : "l"(a), "l"(b),
      "r"(add));
#endif
}
#endif
extern "C" __global__ void __launch_bounds__(160, 1) k(const __grid_constant__ w_map ma,
    const __grid_constant__ w_map mw, const void* __restrict__ in0, const void* __restrict__ in1,
    void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { STAGE = 10240, FULL = 51200, EMPTY = FULL + 40 };
  const u32 sb = w_shared(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int rank = 0, tile = role.block_x();
  const int first = rank * 5, last = (rank + 1) * 5;
  const int z = tile / 2, tn = tile % 2, n0 = tn * 64, i0 = 0;
  const int g = z / 3, b = z % 3;
  (void)g; (void)b;
  if (t == 0) {
    for (int i = 0; i < 5; ++i) {
      w_bar_init(sb + FULL + 8 * i, 1);
      w_bar_init(sb + EMPTY + 8 * i, 4);
    }
    w_bar_ready();
  }
  role.sync();
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
      #pragma unroll 1
      for (u32 it = 0, slot = 0, lap = 0; it < (u32)(last - first); ++it, slot = slot == 4 ? 0 : slot + 1,
          lap ^= slot == 0) {
        const int kb = first + (int)it;
        const u32 bar = sb + FULL + 8 * slot, at = sb + slot * STAGE;
        {
          w_bar_wait(sb + EMPTY + 8 * slot, lap ^ 1);
          w_bar_expect(bar, 10240u);
          const u32 to = at;
          w_tma(&mw, to, bar, n0, kb * 64, b % 3);
        }
        const u32 to = at + 8192;
        {
          const int q = kb;
          (void)q;
          const int c = q % 5 * 64;
          w_tma(&ma, to, bar, c, i0, b % 3);
        }
      }
    }
  } else {
    // swap-AB: the 64 rows of wgmma are columns of the result, so that few rows of it fill an instruction
    // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
    role.pdl_wait();
    role.pdl_trigger();
    // the parity of a slot's phase flips whenever the ring comes round
    float acc[8];
    #pragma unroll 1
    for (u32 it = 0, slot = 0, lap = 0; it < (u32)(last - first); ++it, slot = slot == 4 ? 0 : slot + 1,
        lap ^= slot == 0) {
      const u32 at = sb + slot * STAGE;
      w_bar_wait(sb + FULL + 8 * slot, lap);
      w_group_begin();
      #pragma unroll
      for (u32 q = 0; q < 4; ++q)
        w_product_f16_10(acc, w_operand_at(at + q * 2048, 8192, 1024, 1), w_operand_at(at + 8192 + q * 32, 16, 1024, 1),
            it | q);
      w_group_commit();
      w_group_wait<1>();
      // the products before these are complete: their stage is free
      if (it > 0 && lane == 0) w_bar_arrive(sb + EMPTY + 8 * (slot == 0 ? 4 : slot - 1));
    }
    w_group_wait<0>();
    // the accumulators are transposed through the shared memory of the stages
    role.named_barrier(0, 128);
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = (warp >> 2) * 64 + (warp & 3) * 16 + (lane >> 2) + 8 * h;
      const int n = (warp >> 2) * 64 + (warp & 3) * 16 + (lane >> 2) + 8 * h;
      #pragma unroll
      for (int c = 0; c < 2; ++c)
        #pragma unroll
        for (int e = 0; e < 2; ++e) ((float*)sm)[(8 * c + 2 * (lane & 3) + e) * 68 + n] = acc[4 * c + 2 * h + e];
    }
    role.named_barrier(0, 128);
    #pragma unroll 1
    for (int o = rank * 128 + t; o < 80; o += 128) {
      const int row = o / 8, c = o % 8, m = i0 + row;
      float v[8];
      #pragma unroll
      for (int y = 0; y < 1; ++y)
        #pragma unroll
        for (int e = 0; e < 8; e += 4) {
          const float4 x = *(const float4*)((const float*)sm + row * 68 + c * 8 + e);
          const bool more = y > 0;
          v[e] = more ? v[e] + x.x : x.x;
          v[e + 1] = more ? v[e + 1] + x.y : x.y;
          v[e + 2] = more ? v[e + 2] + x.z : x.z;
          v[e + 3] = more ? v[e + 3] + x.w : x.w;
        }
      {
        const int n = n0 + c * 8;
        if (n < 72) {
          u16* const y0 = (u16*)out0 + (m * 72 + b * 720 + n);
          *(uint4*)(y0) = make_uint4(w_narrow2_f16(v[0], v[1]), w_narrow2_f16(v[2], v[3]), w_narrow2_f16(v[4], v[5]),
              w_narrow2_f16(v[6], v[7]));
        }
      }
    }
  }
}
