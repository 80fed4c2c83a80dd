// test_attention CASES one tile
// {"generator": "cuda", "params": [["blocks", 0], ["bn", 32], ["groups", 1], ["keyed", false], ["resident", 3], ["stages", 1], ["template", "attention_tma"], ["turns", false]]}
// k: (6, 1, 1) x (256, 1, 1), 16576 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
// weft_cuda_tma.h
// weft_cuda_attention.h
#ifdef W_EMULATED
#define w_exp2 exp2f
#else
W_FN float w_exp2(float x) {  // within 2 ulp
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
#endif
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
#ifndef W_EMULATED
W_FN void w_weighted_f16(float (&d)[8], const u32 (&a)[4], u64 b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16"
      " {%0, %1, %2, %3, %4, %5, %6, %7},"
      " {%8, %9, %10, %11}, %12, 1, 1, 1, 1;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) : "r"(a[0]),
      "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
#endif
struct k_frame : w_solo {
  using w_solo::w_solo;
  static W_FN void dealloc_registers() { w_fewer_registers<32>(); }
  static W_FN void alloc_registers() { w_more_registers<128>(); }
};
extern "C" __global__ void __launch_bounds__(256, 3) k(const __grid_constant__ w_map mq,
    const __grid_constant__ w_map mk, const __grid_constant__ w_map mv, void* __restrict__ out0) {
  static constexpr k_frame role{};
  W_DYNAMIC(sm);
  enum { KEYS = 8192, VALUES = KEYS + 4096, BARS = VALUES + 4096, FULLK = BARS, EMPTYK = FULLK + 8, FULLV = EMPTYK + 8,
      EMPTYV = FULLV + 8, FULLQ = EMPTYV + 8, EMPTYQ = FULLQ + 8, TURN = EMPTYQ + 8, KNOWN = TURN + 24,
      READ = KNOWN + 8, MET = READ + 8, BAD = MET + 8, OTHERS = BAD + 96 };
  const u32 sb = w_shared(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  // rings of keys and values: full barriers count TMA's bytes, empty ones the warps that have read a tile
  if (t == 0) {
    for (int i = 0; i < 1; ++i) {
      w_bar_init(sb + FULLK + 8 * i, 1);
      w_bar_init(sb + EMPTYK + 8 * i, 4);
      w_bar_init(sb + FULLV + 8 * i, 1);
      w_bar_init(sb + EMPTYV + 8 * i, 4);
    }
    w_bar_init(sb + FULLQ, 1);
    w_bar_init(sb + EMPTYQ, 4);
    for (int i = 0; i < 1; ++i) w_bar_init(sb + TURN + 8 * i, 4);
    w_bar_init(sb + KNOWN, 3);
    w_bar_init(sb + READ, 4);
    w_bar_init(sb + MET, 1);
    w_bar_ready();
  }
  role.sync();
  if (warp >= 4) {
    // producer warpgroup: one thread asks TMA for queries, keys and values
    role.dealloc_registers();
    if (warp == 4) {
      if (lane == 0) {
        w_map_prefetch(&mq);
        w_map_prefetch(&mk);
        w_map_prefetch(&mv);
      }
      // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
      __syncwarp();
      role.pdl_wait();
      role.pdl_trigger();
      if (lane == 0) {
        u32 it = 0, job = 0;
        for (int tile = role.block_x(), once = 1; once; once = 0) {
          const int band = tile, in = 0, tq = -in, rest = 0, z = band + rest, copy = 0, m0 = copy * 24 + tq * 64;
          (void)z; (void)copy; (void)m0;
          const int count = 1;
          (void)count;
          w_bar_wait(sb + EMPTYQ, job & 1 ^ 1);
          ++job;
          w_bar_expect(sb + FULLQ, 8192u);
          {
            const int m = m0;
            (void)m;
            w_tma(&mq, sb, sb + FULLQ, 0, m, z);
          }
          #pragma unroll 1
          for (int i = count - 1; i >= 0; --i, ++it) {
            const int n = i * 32;
            const u32 slot = 0, phase = it & 1;
            (void)n;
            {
              const u32 bar = sb + FULLK + 8 * slot, to = sb + KEYS + slot * 4096;
              w_bar_wait(sb + EMPTYK + 8 * slot, phase ^ 1);
              w_bar_expect(bar, 4096u);
              w_tma(&mk, to, bar, 0, n, z);
            }
            {
              const u32 bar = sb + FULLV + 8 * slot, to = sb + VALUES + slot * 4096;
              w_bar_wait(sb + EMPTYV + 8 * slot, phase ^ 1);
              w_bar_expect(bar, 4096u);
              w_tma(&mv, to, bar, 0, n, z);
            }
          }
        }
      }
    } else {
      role.pdl_wait();
      role.pdl_trigger();
    }
  } else {
    // consumer warpgroups: scores and results by wgmma, softmax in registers between them
    role.alloc_registers();
    role.pdl_wait();
    role.pdl_trigger();
    const int group = warp >> 2, row = group * 64 + (warp & 3) * 16 + (lane >> 2);
    const u64 dq = w_operand_at(sb + (u32)(group * 64 * 128), 16, 1024, 1);
    u32 it = 0, job = 0;
    for (int tile = role.block_x(), once = 1; once; once = 0) {
      const int band = tile, in = 0, tq = -in, rest = 0, z = band + rest, copy = 0, m0 = copy * 24 + tq * 64;
      (void)z; (void)copy; (void)m0;
      const int count = 1;
      (void)count;
      float o[8], s[16], top[2], total[2];
      u32 w[2][4];
      #pragma unroll
      for (int j = 0; j < 8; ++j) o[j] = 0.0f;
      top[0] = top[1] = -__builtin_inff();
      total[0] = total[1] = 0.0f;
      const int limit[2] = {23, 23}, full = 0;
      w_bar_wait(sb + FULLQ, job & 1);
      ++job;
      {
        const int i = count - 1;
        (void)i;
        const u32 slot = 0, phase = it & 1;
        w_bar_wait(sb + FULLK + 8 * slot, phase);
        {
          const u64 dk = w_operand_at(sb + KEYS + slot * 4096, 16, 1024, 1);
          w_group_begin();
          #pragma unroll
          for (int kk = 0; kk < 1; ++kk)
            w_product_f16_00(s, dq + (kk / 4 * 512 + kk % 4 * 2), dk + (kk / 4 * 256 + kk % 4 * 2), kk);
          w_group_commit();
        }
        w_group_wait<0>();
        w_hold(s);
        if (lane == 0) w_bar_arrive(sb + EMPTYK + 8 * slot);
        // keys that a row does not see, or that do not exist
        if (i >= full) {
          #pragma unroll
          for (int j = 0; j < 4; ++j)
            #pragma unroll
            for (int h = 0; h < 2; ++h)
              #pragma unroll
              for (int e = 0; e < 2; ++e) {
                const int at = i * 32 + j * 8 + (lane & 3) * 2 + e;
                if (at > limit[h]) s[4 * j + 2 * h + e] = -__builtin_inff();
              }
        }
        // online softmax: exponentials on the scale of a row's maximum so far; four lanes share a row
        float most[2][2], sums[2][2];
        #pragma unroll
        for (int h = 0; h < 2; ++h)
          #pragma unroll
          for (int e = 0; e < 2; ++e) {
            most[h][e] = s[2 * h + e];
            sums[h][e] = 0.0f;
          }
        #pragma unroll
        for (int j = 0; j < 4; ++j)
          #pragma unroll
          for (int h = 0; h < 2; ++h)
            #pragma unroll
            for (int e = 0; e < 2; ++e) most[h][e] = w_max_f32(most[h][e], s[4 * j + 2 * h + e]);
        float low[2], base[2];
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x = w_max_f32(most[h][0], most[h][1]);
          x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 1)));
          x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 2)));
          low[h] = x == -__builtin_inff() ? 0.0f : x;
          base[h] = low[h] * 0.3606737554073334f;
          top[h] = x;
        }
        #pragma unroll
        for (int j = 0; j < 4; ++j)
          #pragma unroll
          for (int h = 0; h < 2; ++h)
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
              s[4 * j + 2 * h + e] = w_exp2(fmaf(s[4 * j + 2 * h + e], 0.3606737554073334f, -base[h]));
              sums[h][e] += s[4 * j + 2 * h + e];
            }
        #pragma unroll
        for (int h = 0; h < 2; ++h) total[h] = (sums[h][0] + sums[h][1]);
        // sums of products are, rounded, the left operand of the next product as they stand
        #pragma unroll
        for (int q = 0; q < 2; ++q)
          #pragma unroll
          for (int e = 0; e < 4; ++e) w[q][e] = w_narrow2_f16(s[8 * q + 2 * e], s[8 * q + 2 * e + 1]);
        if (i >= 1) w_bar_wait(sb + FULLK, it + 1 & 1);
      }
      // the scores of a tile run beside the results of the one before, its softmax beside those
      #pragma unroll 1
      for (int i = count - 2; i >= 0; i -= 1, it += 1) {
        const u32 slot = 0, phase = it & 1, next = 0;
        {
          const u64 dk = w_operand_at(sb + KEYS + next * 4096, 16, 1024, 1);
          w_group_begin();
          #pragma unroll
          for (int kk = 0; kk < 1; ++kk)
            w_product_f16_00(s, dq + (kk / 4 * 512 + kk % 4 * 2), dk + (kk / 4 * 256 + kk % 4 * 2), kk);
          w_group_commit();
        }
        {
          w_bar_wait(sb + FULLV + 8 * slot, phase);
          const u64 dv = w_operand_at(sb + VALUES + slot * 4096, 4096, 1024, 1);
          w_group_begin();
          #pragma unroll
          for (int q = 0; q < 2; ++q) w_weighted_f16(o, w[q], dv + q * 128);
          w_group_commit();
        }
        w_group_wait<1>();
        w_hold(s);
        if (lane == 0) w_bar_arrive(sb + EMPTYK + 8 * next);
        // keys that a row does not see, or that do not exist
        if (i >= full) {
          #pragma unroll
          for (int j = 0; j < 4; ++j)
            #pragma unroll
            for (int h = 0; h < 2; ++h)
              #pragma unroll
              for (int e = 0; e < 2; ++e) {
                const int at = i * 32 + j * 8 + (lane & 3) * 2 + e;
                if (at > limit[h]) s[4 * j + 2 * h + e] = -__builtin_inff();
              }
        }
        // online softmax: exponentials on the scale of a row's maximum so far; four lanes share a row
        float most[2][2], sums[2][2];
        #pragma unroll
        for (int h = 0; h < 2; ++h)
          #pragma unroll
          for (int e = 0; e < 2; ++e) {
            most[h][e] = s[2 * h + e];
            sums[h][e] = 0.0f;
          }
        #pragma unroll
        for (int j = 0; j < 4; ++j)
          #pragma unroll
          for (int h = 0; h < 2; ++h)
            #pragma unroll
            for (int e = 0; e < 2; ++e) most[h][e] = w_max_f32(most[h][e], s[4 * j + 2 * h + e]);
        float old[2];
        float low[2], base[2];
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x = w_max_f32(most[h][0], most[h][1]);
          x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 1)));
          x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 2)));
          x = w_max_f32(x, top[h]);
          low[h] = x == -__builtin_inff() ? 0.0f : x;
          old[h] = w_exp2((top[h] - low[h]) * 0.3606737554073334f);
          base[h] = low[h] * 0.3606737554073334f;
          top[h] = x;
        }
        #pragma unroll
        for (int j = 0; j < 4; ++j)
          #pragma unroll
          for (int h = 0; h < 2; ++h)
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
              s[4 * j + 2 * h + e] = w_exp2(fmaf(s[4 * j + 2 * h + e], 0.3606737554073334f, -base[h]));
              sums[h][e] += s[4 * j + 2 * h + e];
            }
        #pragma unroll
        for (int h = 0; h < 2; ++h) total[h] = total[h] * old[h] + (sums[h][0] + sums[h][1]);
        w_hold(s);
        if (i >= 1) w_bar_wait(sb + FULLK, it + 2 & 1);
        w_group_wait<0>();
        w_hold(o);
        if (lane == 0) w_bar_arrive(sb + EMPTYV + 8 * slot);
        #pragma unroll
        for (int j = 0; j < 8; ++j) o[j] *= old[j >> 1 & 1];
        // sums of products are, rounded, the left operand of the next product as they stand
        #pragma unroll
        for (int q = 0; q < 2; ++q)
          #pragma unroll
          for (int e = 0; e < 4; ++e) w[q][e] = w_narrow2_f16(s[8 * q + 2 * e], s[8 * q + 2 * e + 1]);
      }
      if (lane == 0) w_bar_arrive(sb + EMPTYQ);
      {
        const u32 slot = 0, phase = it & 1;
        ++it;
        w_group_begin();
        {
          w_bar_wait(sb + FULLV + 8 * slot, phase);
          const u64 dv = w_operand_at(sb + VALUES + slot * 4096, 4096, 1024, 1);
          w_group_begin();
          #pragma unroll
          for (int q = 0; q < 2; ++q) w_weighted_f16(o, w[q], dv + q * 128);
          w_group_commit();
        }
        w_group_wait<0>();
        w_hold(o);
        if (lane == 0) w_bar_arrive(sb + EMPTYV + 8 * slot);
      }
      // epilogue: four neighbouring lanes exchange, so that each stores 8 neighbours
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = total[h];
        x += __uint_as_float(w_shfl_word(__float_as_uint(x), 1));
        x += __uint_as_float(w_shfl_word(__float_as_uint(x), 2));
        const float all = 1.0f / x;
        const int m = m0 + row + 8 * h;
        #pragma unroll
        for (int j = 0; j < 1; ++j) {
          float v[8];
          #pragma unroll
          for (int c = 0; c < 4; ++c)
            #pragma unroll
            for (int e = 0; e < 2; ++e)
              v[2 * c + e] = 4 * j + c < 2 ? o[(4 * j + c < 2 ? 4 * j + c : 0) * 4 + 2 * h + e] * all : 0.0f;
          w_quad(v, lane);
          const int c = j * 32 + (lane & 3) * 8;
          if (m < 24 && c < 16) {
            u16* const y = (u16*)out0 + (z * 384 + m * 16 + c);
            {
              *(uint4*)(y) = make_uint4(w_narrow2_f16(v[0], v[1]), w_narrow2_f16(v[2], v[3]), w_narrow2_f16(v[4], v[5]),
                  w_narrow2_f16(v[6], v[7]));
            }
          }
        }
      }
    }
  }
}
