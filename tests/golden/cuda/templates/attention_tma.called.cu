// test_called_attention CASES warpgroups, causal, packed
// {"generator": "cuda", "params": [["blocks", 0], ["bn", 48], ["groups", 2], ["keyed", false], ["resident", 1], ["stages", 3], ["template", "attention_tma"], ["turns", true]]}
// k: (8, 1, 1) x (384, 1, 1), 53504 bytes
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
// logarithm of a row's sum; infinity where nothing was added or a score is NaN, as FlashAttention-2 has it
W_FN float w_log_sum(float top, float sum) { return sum > 0.0f ? top + logf(sum) : __builtin_inff(); }
#ifndef W_EMULATED
W_FN void w_product_bf16_00(float (&d)[24], u64 a, u64 b, int add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %26, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "  %16, %17, %18, %19, %20, %21, %22, %23},"
      " %24, %25, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]) : "l"(a), "l"(b),
      "r"(add));
#endif
}
#endif
#ifndef W_EMULATED
W_FN void w_weighted_bf16(float (&d)[32], const u32 (&a)[4], u64 b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "  %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
      " {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) : "r"(a[0]), "r"(a[1]),
      "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
#endif
struct k_frame : w_solo {
  using w_solo::w_solo;
  static W_FN void dealloc_registers() { w_fewer_registers<40>(); }
  static W_FN void alloc_registers() { w_more_registers<232>(); }
};
extern "C" __global__ void __launch_bounds__(384, 1) k(const __grid_constant__ w_map mq,
    const __grid_constant__ w_map mk, const __grid_constant__ w_map mv, void* __restrict__ out0,
    void* __restrict__ out1) {
  static constexpr k_frame role{};
  W_DYNAMIC(sm);
  enum { KEYS = 16384, VALUES = KEYS + 18432, BARS = VALUES + 18432, FULLK = BARS, EMPTYK = FULLK + 24,
      FULLV = EMPTYK + 24, EMPTYV = FULLV + 24, FULLQ = EMPTYV + 24, EMPTYQ = FULLQ + 8, TURN = EMPTYQ + 8,
      KNOWN = TURN + 24, READ = KNOWN + 8, MET = READ + 8, BAD = MET + 8, OTHERS = BAD + 96 };
  const u32 sb = w_shared(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  // rings of keys and values: full barriers count TMA's bytes, empty ones the warps that have read a tile
  if (t == 0) {
    for (int i = 0; i < 3; ++i) {
      w_bar_init(sb + FULLK + 8 * i, 1);
      w_bar_init(sb + EMPTYK + 8 * i, 8);
      w_bar_init(sb + FULLV + 8 * i, 1);
      w_bar_init(sb + EMPTYV + 8 * i, 8);
    }
    w_bar_init(sb + FULLQ, 1);
    w_bar_init(sb + EMPTYQ, 8);
    for (int i = 0; i < 2; ++i) w_bar_init(sb + TURN + 8 * i, 4);
    w_bar_init(sb + KNOWN, 3);
    w_bar_init(sb + READ, 8);
    w_bar_init(sb + MET, 4);
    w_bar_ready();
  }
  role.sync();
  if (warp >= 8) {
    // producer warpgroup: one thread asks TMA for queries, keys and values
    role.dealloc_registers();
    if (warp == 8) {
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
          const int band = tile / 8, in = tile % 8, tq = 1 - in / 4, rest = in % 4, z = band * 4 + rest, copy = 0,
              m0 = copy * 150 + tq * 128;
          (void)z; (void)copy; (void)m0;
          const int count = (tq == 1 || (tq * 128 + 127) / 48 >= 4 ? 4 : tq * 128 + 127 < 0 ? 1
              : (tq * 128 + 127) / 48 + 1);
          (void)count;
          w_bar_wait(sb + EMPTYQ, job & 1 ^ 1);
          ++job;
          w_bar_expect(sb + FULLQ, 16384u);
          {
            const int m = m0;
            (void)m;
            w_tma(&mq, sb, sb + FULLQ, 0, m, z % 2, z / 2);
          }
          {
            const int m = m0 + 64;
            (void)m;
            w_tma(&mq, sb + 8192, sb + FULLQ, 0, m, z % 2, z / 2);
          }
          #pragma unroll 1
          for (int i = count - 1; i >= 0; --i, ++it) {
            const int n = i * 48;
            const u32 slot = it % 3, phase = it / 3 & 1;
            (void)n;
            {
              const u32 bar = sb + FULLK + 8 * slot, to = sb + KEYS + slot * 6144;
              w_bar_wait(sb + EMPTYK + 8 * slot, phase ^ 1);
              w_bar_expect(bar, 6144u);
              w_tma(&mk, to, bar, 128, n, z % 2, z / 2);
            }
            {
              const u32 bar = sb + FULLV + 8 * slot, to = sb + VALUES + slot * 6144;
              w_bar_wait(sb + EMPTYV + 8 * slot, phase ^ 1);
              w_bar_expect(bar, 6144u);
              w_tma(&mv, to, bar, 256, n, z % 2, z / 2);
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
    u32 it = 0, job = 0, turn = 0;
    for (int tile = role.block_x(), once = 1; once; once = 0) {
      const int band = tile / 8, in = tile % 8, tq = 1 - in / 4, rest = in % 4, z = band * 4 + rest, copy = 0,
          m0 = copy * 150 + tq * 128;
      (void)z; (void)copy; (void)m0;
      const int count = (tq == 1 || (tq * 128 + 127) / 48 >= 4 ? 4 : tq * 128 + 127 < 0 ? 1
          : (tq * 128 + 127) / 48 + 1);
      (void)count;
      float o[32], s[24], top[2], total[2];
      u32 w[3][4];
      #pragma unroll
      for (int j = 0; j < 32; ++j) o[j] = 0.0f;
      top[0] = top[1] = -__builtin_inff();
      total[0] = total[1] = 0.0f;
      int limit[2];
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int x = tq * 128 + row + 8 * h;
        limit[h] = x < 149 ? x : 149;
      }
      const int seen = tq * 128 + group * 64 + 1, full = seen < 48 ? 0 : (seen < 150 ? seen : 150) / 48;
      w_bar_wait(sb + FULLQ, job & 1);
      ++job;
      {
        const int i = count - 1;
        (void)i;
        const u32 slot = it % 3, phase = it / 3 & 1;
        w_bar_wait(sb + FULLK + 8 * slot, phase);
        {
          const u64 dk = w_operand_at(sb + KEYS + slot * 6144, 16, 1024, 1);
          w_group_begin();
          #pragma unroll
          for (int kk = 0; kk < 4; ++kk)
            w_product_bf16_00(s, dq + (kk / 4 * 512 + kk % 4 * 2), dk + (kk / 4 * 384 + kk % 4 * 2), kk);
          w_group_commit();
        }
        w_group_wait<0>();
        w_hold(s);
        if (lane == 0) w_bar_arrive(sb + EMPTYK + 8 * slot);
        // keys that a row does not see, or that do not exist
        if (i >= full) {
          #pragma unroll
          for (int j = 0; j < 6; ++j)
            #pragma unroll
            for (int h = 0; h < 2; ++h)
              #pragma unroll
              for (int e = 0; e < 2; ++e) {
                const int at = i * 48 + j * 8 + (lane & 3) * 2 + e;
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
        for (int j = 0; j < 6; ++j)
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
          base[h] = low[h] * 0.1803368777036667f;
          top[h] = x;
        }
        if (w_any_lane(fabsf(base[0]) > 4096.0f || fabsf(base[1]) > 4096.0f)) {
          #pragma unroll
          for (int j = 0; j < 6; ++j)
            #pragma unroll
            for (int h = 0; h < 2; ++h)
              #pragma unroll
              for (int e = 0; e < 2; ++e) {
                s[4 * j + 2 * h + e] = w_exp2((s[4 * j + 2 * h + e] - low[h]) * 0.1803368777036667f);
                sums[h][e] += s[4 * j + 2 * h + e];
              }
        } else {
          #pragma unroll
          for (int j = 0; j < 6; ++j)
            #pragma unroll
            for (int h = 0; h < 2; ++h)
              #pragma unroll
              for (int e = 0; e < 2; ++e) {
                s[4 * j + 2 * h + e] = w_exp2(fmaf(s[4 * j + 2 * h + e], 0.1803368777036667f, -base[h]));
                sums[h][e] += s[4 * j + 2 * h + e];
              }
        }
        #pragma unroll
        for (int h = 0; h < 2; ++h) total[h] = (sums[h][0] + sums[h][1]);
        // sums of products are, rounded, the left operand of the next product as they stand
        #pragma unroll
        for (int q = 0; q < 3; ++q)
          #pragma unroll
          for (int e = 0; e < 4; ++e) w[q][e] = w_narrow2_bf16(s[8 * q + 2 * e], s[8 * q + 2 * e + 1]);
        if (i >= 1) w_bar_wait(sb + FULLK + 8 * ((it + 1) % 3), (it + 1) / 3 & 1);
      }
      // the scores of a tile run beside the results of the one before, its softmax beside those
      #pragma unroll 1
      for (int i = count - 2; i >= 0; i -= 1, it += 1) {
        const u32 slot = it % 3, phase = it / 3 & 1, next = (it + 1) % 3;
        // ping-pong: warpgroups issue products in turn
        w_bar_wait(sb + TURN + 8 * group, (group == 0 ? turn + 1 : turn) & 1);
        ++turn;
        {
          const u64 dk = w_operand_at(sb + KEYS + next * 6144, 16, 1024, 1);
          w_group_begin();
          #pragma unroll
          for (int kk = 0; kk < 4; ++kk)
            w_product_bf16_00(s, dq + (kk / 4 * 512 + kk % 4 * 2), dk + (kk / 4 * 384 + kk % 4 * 2), kk);
          w_group_commit();
        }
        {
          w_bar_wait(sb + FULLV + 8 * slot, phase);
          const u64 dv = w_operand_at(sb + VALUES + slot * 6144, 6144, 1024, 1);
          w_group_begin();
          #pragma unroll
          for (int q = 0; q < 3; ++q) w_weighted_bf16(o, w[q], dv + q * 128);
          w_group_commit();
        }
        if (lane == 0) w_bar_arrive(sb + TURN + 8 * (group + 1 == 2 ? 0 : group + 1));
        w_group_wait<1>();
        w_hold(s);
        if (lane == 0) w_bar_arrive(sb + EMPTYK + 8 * next);
        // keys that a row does not see, or that do not exist
        if (i >= full) {
          #pragma unroll
          for (int j = 0; j < 6; ++j)
            #pragma unroll
            for (int h = 0; h < 2; ++h)
              #pragma unroll
              for (int e = 0; e < 2; ++e) {
                const int at = i * 48 + j * 8 + (lane & 3) * 2 + e;
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
        for (int j = 0; j < 6; ++j)
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
          old[h] = w_exp2((top[h] - low[h]) * 0.1803368777036667f);
          base[h] = low[h] * 0.1803368777036667f;
          top[h] = x;
        }
        if (w_any_lane(fabsf(base[0]) > 4096.0f || fabsf(base[1]) > 4096.0f)) {
          #pragma unroll
          for (int j = 0; j < 6; ++j)
            #pragma unroll
            for (int h = 0; h < 2; ++h)
              #pragma unroll
              for (int e = 0; e < 2; ++e) {
                s[4 * j + 2 * h + e] = w_exp2((s[4 * j + 2 * h + e] - low[h]) * 0.1803368777036667f);
                sums[h][e] += s[4 * j + 2 * h + e];
              }
        } else {
          #pragma unroll
          for (int j = 0; j < 6; ++j)
            #pragma unroll
            for (int h = 0; h < 2; ++h)
              #pragma unroll
              for (int e = 0; e < 2; ++e) {
                s[4 * j + 2 * h + e] = w_exp2(fmaf(s[4 * j + 2 * h + e], 0.1803368777036667f, -base[h]));
                sums[h][e] += s[4 * j + 2 * h + e];
              }
        }
        #pragma unroll
        for (int h = 0; h < 2; ++h) total[h] = total[h] * old[h] + (sums[h][0] + sums[h][1]);
        w_hold(s);
        if (i >= 1) w_bar_wait(sb + FULLK + 8 * ((it + 2) % 3), (it + 2) / 3 & 1);
        w_group_wait<0>();
        w_hold(o);
        if (lane == 0) w_bar_arrive(sb + EMPTYV + 8 * slot);
        #pragma unroll
        for (int j = 0; j < 32; ++j) o[j] *= old[j >> 1 & 1];
        // sums of products are, rounded, the left operand of the next product as they stand
        #pragma unroll
        for (int q = 0; q < 3; ++q)
          #pragma unroll
          for (int e = 0; e < 4; ++e) w[q][e] = w_narrow2_bf16(s[8 * q + 2 * e], s[8 * q + 2 * e + 1]);
      }
      if (lane == 0) w_bar_arrive(sb + EMPTYQ);
      {
        const u32 slot = it % 3, phase = it / 3 & 1;
        ++it;
        w_group_begin();
        {
          w_bar_wait(sb + FULLV + 8 * slot, phase);
          const u64 dv = w_operand_at(sb + VALUES + slot * 6144, 6144, 1024, 1);
          w_group_begin();
          #pragma unroll
          for (int q = 0; q < 3; ++q) w_weighted_bf16(o, w[q], dv + q * 128);
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
        {
          const int m = m0 + row + 8 * h;
          if ((lane & 3) == 0 && m < 150) *((float*)out1 + (z * 150 + m)) = w_log_sum(top[h] * 0.125f, x);
        }
        if (x == 0.0f) x = 1.0f;
        const float all = 1.0f / x;
        const int m = m0 + row + 8 * h;
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          float v[8];
          v[0] = o[4 * j * 4 + 2 * h] * all;
          v[1] = o[4 * j * 4 + 2 * h + 1] * all;
          v[2] = o[(4 * j + 1) * 4 + 2 * h] * all;
          v[3] = o[(4 * j + 1) * 4 + 2 * h + 1] * all;
          v[4] = o[(4 * j + 2) * 4 + 2 * h] * all;
          v[5] = o[(4 * j + 2) * 4 + 2 * h + 1] * all;
          v[6] = o[(4 * j + 3) * 4 + 2 * h] * all;
          v[7] = o[(4 * j + 3) * 4 + 2 * h + 1] * all;
          w_quad(v, lane);
          const int c = j * 32 + (lane & 3) * 8;
          if (m < 150) {
            u16* const y = (u16*)out0 + (z % 2 * 64 + z / 2 * 19200 + m * 128 + c);
            {
              *(uint4*)(y) = make_uint4(w_narrow2_bf16(v[0], v[1]), w_narrow2_bf16(v[2], v[3]),
                  w_narrow2_bf16(v[4], v[5]), w_narrow2_bf16(v[6], v[7]));
            }
          }
        }
      }
    }
  }
}
