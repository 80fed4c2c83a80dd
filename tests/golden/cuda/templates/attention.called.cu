// test_called_attention CASES packed
// {"generator": "cuda", "params": [["mi", 1], ["nb", 16], ["stages", 3], ["template", "attention"], ["wk", 1], ["wr", 1]]}
// k: (12, 1, 1) x (32, 1, 1), 16128 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
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
extern "C" __global__ void __launch_bounds__(32, 1) k(const void* __restrict__ in0, void* __restrict__ out0,
    void* __restrict__ out1) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  const u32 sb = w_shared(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int z = role.block_x() / 3, m0 = role.block_x() % 3 * 16;
  const int row0 = warp * 16, key0 = 0;
  (void)z; (void)m0; (void)key0;
  auto fill_q = [&](int first, u32 to) {
    auto place = [&](int x, int& r, int& c) {
      r = x / 8;
      c = x % 8 * 8;
    };
    const u16* const base = (const u16*)in0 + (z % 2 * 64 + z / 2 * 14208);
    #pragma unroll
    for (int x = t; x < 128; x += 32) {
      int r, c;
      place(x, r, c);
      const bool inside = first + r < 37;
      const u16* const from = base + (inside ? (first + r) * 384 + c : 0);
      w_copy16(to + (u32)(r * 144 + c * 2), from, inside ? 16u : 0u);
    }
  };
  auto fill_k = [&](int first, u32 to) {
    auto place = [&](int x, int& r, int& c) {
      r = x / 8;
      c = x % 8 * 8;
    };
    const u16* const base = (const u16*)in0 + (z % 2 * 64 + z / 2 * 14208 + 128);
    #pragma unroll
    for (int x = t; x < 128; x += 32) {
      int r, c;
      place(x, r, c);
      const bool inside = first + r < 37;
      const u16* const from = base + (inside ? (first + r) * 384 + c : 0);
      w_copy16(to + (u32)(r * 144 + c * 2), from, inside ? 16u : 0u);
    }
  };
  auto fill_v = [&](int first, u32 to) {
    auto place = [&](int x, int& r, int& c) {
      r = x / 8;
      c = x % 8 * 8;
    };
    const u16* const base = (const u16*)in0 + (z % 2 * 64 + z / 2 * 14208 + 256);
    #pragma unroll
    for (int x = t; x < 128; x += 32) {
      int r, c;
      place(x, r, c);
      const bool inside = first + r < 37;
      const u16* const from = base + (inside ? (first + r) * 384 + c : 0);
      w_copy16(to + (u32)(r * 144 + c * 2), from, inside ? 16u : 0u);
    }
  };
  float o[1][8][4], top[1][2], total[1][2];
  #pragma unroll
  for (int a = 0; a < 1; ++a) {
    #pragma unroll
    for (int j = 0; j < 8; ++j)
      #pragma unroll
      for (int e = 0; e < 4; ++e) o[a][j][e] = 0.0f;
    top[a][0] = top[a][1] = -__builtin_inff();
    total[a][0] = total[a][1] = 0.0f;
  }
  role.pdl_wait();
  role.pdl_trigger();
  // groups of copies: queries with the first keys, their values, the next keys, ...
  fill_q(m0, sb);
  fill_k(0, sb + 2304u);
  w_commit();
  fill_v(0, sb + 4608u);
  w_commit();
  fill_k(16, sb + 6912u);
  w_commit();
  fill_v(16, sb + 9216u);
  w_commit();
  fill_k(32, sb + 11520u);
  w_commit();
  fill_v(32, sb + 13824u);
  w_commit();
  u32 fq[1][4][4];
  w_arrived<0>();
  role.sync();
  #pragma unroll
  for (int a = 0; a < 1; ++a)
    #pragma unroll
    for (int kk = 0; kk < 4; ++kk)
      w_matrices(fq[a][kk], sb + (u32)((row0 + a * 16 + (lane & 15)) * 144 + kk * 32 + (lane >> 4) * 16));
  float even[1][2][4], odd[1][2][4];
  {
    float (&s)[1][2][4] = even;
    const u32 here = sb + 2304u;
    const int n0 = key0;
    (void)here; (void)n0;
    #pragma unroll
    for (int a = 0; a < 1; ++a)
      #pragma unroll
      for (int j = 0; j < 2; ++j)
        #pragma unroll
        for (int e = 0; e < 4; ++e) s[a][j][e] = 0.0f;
    #pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      #pragma unroll
      for (int j = 0; j < 1; ++j) {
        u32 f[4];
        w_matrices(f, here + (u32)((key0 + j * 16 + (lane & 7) + ((lane >> 4) << 3)) * 144 + kk * 32
            + ((lane >> 3) & 1) * 16));
        #pragma unroll
        for (int a = 0; a < 1; ++a) {
          w_mma_bf16(s[a][2 * j], fq[a][kk], f[0], f[1]);
          w_mma_bf16(s[a][2 * j + 1], fq[a][kk], f[2], f[3]);
        }
      }
    }
  }
  {
    float (&s)[1][2][4] = odd;
    const u32 here = sb + 6912u;
    const int n0 = 16 + key0;
    (void)here; (void)n0;
    #pragma unroll
    for (int a = 0; a < 1; ++a)
      #pragma unroll
      for (int j = 0; j < 2; ++j)
        #pragma unroll
        for (int e = 0; e < 4; ++e) s[a][j][e] = 0.0f;
    #pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      #pragma unroll
      for (int j = 0; j < 1; ++j) {
        u32 f[4];
        w_matrices(f, here + (u32)((key0 + j * 16 + (lane & 7) + ((lane >> 4) << 3)) * 144 + kk * 32
            + ((lane >> 3) & 1) * 16));
        #pragma unroll
        for (int a = 0; a < 1; ++a) {
          w_mma_bf16(s[a][2 * j], fq[a][kk], f[0], f[1]);
          w_mma_bf16(s[a][2 * j + 1], fq[a][kk], f[2], f[3]);
        }
      }
    }
  }
  {
    float (&s)[1][2][4] = even;
    const u32 here = sb + 2304u;
    const int n0 = key0;
    (void)here; (void)n0;
    #pragma unroll
    for (int j = 0; j < 2; ++j)
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = n0 + j * 8 + (lane & 3) * 2 + (e & 1);
        #pragma unroll
        for (int a = 0; a < 1; ++a) {
          if (at >= 37) s[a][j][e] = -__builtin_inff();
        }
      }
    // online softmax: exponentials on the scale of a row's maximum so far; four lanes share a row
    #pragma unroll
    for (int a = 0; a < 1; ++a)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = s[a][0][2 * h];
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          x = w_max_f32(x, s[a][j][2 * h]);
          x = w_max_f32(x, s[a][j][2 * h + 1]);
        }
        x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 1)));
        x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 2)));
        x = w_max_f32(x, top[a][h]);
        const float base = x == -__builtin_inff() ? 0.0f : x;
        if (!(x == top[a][h])) {  // rare after the first tiles
          const float old = w_exp2((top[a][h] - base) * 0.1803368777036667f);
          total[a][h] *= old;
          #pragma unroll
          for (int j = 0; j < 8; ++j) {
            o[a][j][2 * h] *= old;
            o[a][j][2 * h + 1] *= old;
          }
        }
        top[a][h] = x;
        #pragma unroll
        for (int j = 0; j < 2; ++j)
          #pragma unroll
          for (int e = 0; e < 2; ++e) {
            s[a][j][2 * h + e] = w_exp2((s[a][j][2 * h + e] - base) * 0.1803368777036667f);
            total[a][h] += s[a][j][2 * h + e];
          }
      }
    // sums of products are, rounded, the left operand of the next product as they stand
    #pragma unroll
    for (int q = 0; q < 1; ++q) {
      u32 w[1][4];
      #pragma unroll
      for (int a = 0; a < 1; ++a) {
        w[a][0] = w_narrow2_bf16(s[a][2 * q][0], s[a][2 * q][1]);
        w[a][1] = w_narrow2_bf16(s[a][2 * q][2], s[a][2 * q][3]);
        w[a][2] = w_narrow2_bf16(s[a][2 * q + 1][0], s[a][2 * q + 1][1]);
        w[a][3] = w_narrow2_bf16(s[a][2 * q + 1][2], s[a][2 * q + 1][3]);
      }
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 f[4];
        w_matrices_transposed(f, here + 2304u + (u32)((key0 + q * 16 + (lane & 15)) * 144 + j * 32 + (lane >> 4) * 16));
        #pragma unroll
        for (int a = 0; a < 1; ++a) {
          w_mma_bf16(o[a][2 * j], w[a], f[0], f[1]);
          w_mma_bf16(o[a][2 * j + 1], w[a], f[2], f[3]);
        }
      }
    }
  }
  {
    float (&s)[1][2][4] = even;
    const u32 here = sb + 11520u;
    const int n0 = 32 + key0;
    (void)here; (void)n0;
    #pragma unroll
    for (int a = 0; a < 1; ++a)
      #pragma unroll
      for (int j = 0; j < 2; ++j)
        #pragma unroll
        for (int e = 0; e < 4; ++e) s[a][j][e] = 0.0f;
    #pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      #pragma unroll
      for (int j = 0; j < 1; ++j) {
        u32 f[4];
        w_matrices(f, here + (u32)((key0 + j * 16 + (lane & 7) + ((lane >> 4) << 3)) * 144 + kk * 32
            + ((lane >> 3) & 1) * 16));
        #pragma unroll
        for (int a = 0; a < 1; ++a) {
          w_mma_bf16(s[a][2 * j], fq[a][kk], f[0], f[1]);
          w_mma_bf16(s[a][2 * j + 1], fq[a][kk], f[2], f[3]);
        }
      }
    }
  }
  {
    float (&s)[1][2][4] = odd;
    const u32 here = sb + 6912u;
    const int n0 = 16 + key0;
    (void)here; (void)n0;
    #pragma unroll
    for (int j = 0; j < 2; ++j)
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = n0 + j * 8 + (lane & 3) * 2 + (e & 1);
        #pragma unroll
        for (int a = 0; a < 1; ++a) {
          if (at >= 37) s[a][j][e] = -__builtin_inff();
        }
      }
    // online softmax: exponentials on the scale of a row's maximum so far; four lanes share a row
    #pragma unroll
    for (int a = 0; a < 1; ++a)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = s[a][0][2 * h];
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          x = w_max_f32(x, s[a][j][2 * h]);
          x = w_max_f32(x, s[a][j][2 * h + 1]);
        }
        x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 1)));
        x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 2)));
        x = w_max_f32(x, top[a][h]);
        const float base = x == -__builtin_inff() ? 0.0f : x;
        if (!(x == top[a][h])) {  // rare after the first tiles
          const float old = w_exp2((top[a][h] - base) * 0.1803368777036667f);
          total[a][h] *= old;
          #pragma unroll
          for (int j = 0; j < 8; ++j) {
            o[a][j][2 * h] *= old;
            o[a][j][2 * h + 1] *= old;
          }
        }
        top[a][h] = x;
        #pragma unroll
        for (int j = 0; j < 2; ++j)
          #pragma unroll
          for (int e = 0; e < 2; ++e) {
            s[a][j][2 * h + e] = w_exp2((s[a][j][2 * h + e] - base) * 0.1803368777036667f);
            total[a][h] += s[a][j][2 * h + e];
          }
      }
    // sums of products are, rounded, the left operand of the next product as they stand
    #pragma unroll
    for (int q = 0; q < 1; ++q) {
      u32 w[1][4];
      #pragma unroll
      for (int a = 0; a < 1; ++a) {
        w[a][0] = w_narrow2_bf16(s[a][2 * q][0], s[a][2 * q][1]);
        w[a][1] = w_narrow2_bf16(s[a][2 * q][2], s[a][2 * q][3]);
        w[a][2] = w_narrow2_bf16(s[a][2 * q + 1][0], s[a][2 * q + 1][1]);
        w[a][3] = w_narrow2_bf16(s[a][2 * q + 1][2], s[a][2 * q + 1][3]);
      }
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 f[4];
        w_matrices_transposed(f, here + 2304u + (u32)((key0 + q * 16 + (lane & 15)) * 144 + j * 32 + (lane >> 4) * 16));
        #pragma unroll
        for (int a = 0; a < 1; ++a) {
          w_mma_bf16(o[a][2 * j], w[a], f[0], f[1]);
          w_mma_bf16(o[a][2 * j + 1], w[a], f[2], f[3]);
        }
      }
    }
  }
  {
    float (&s)[1][2][4] = even;
    const u32 here = sb + 11520u;
    const int n0 = 32 + key0;
    (void)here; (void)n0;
    #pragma unroll
    for (int j = 0; j < 2; ++j)
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = n0 + j * 8 + (lane & 3) * 2 + (e & 1);
        #pragma unroll
        for (int a = 0; a < 1; ++a) {
          if (at >= 37) s[a][j][e] = -__builtin_inff();
        }
      }
    // online softmax: exponentials on the scale of a row's maximum so far; four lanes share a row
    #pragma unroll
    for (int a = 0; a < 1; ++a)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = s[a][0][2 * h];
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          x = w_max_f32(x, s[a][j][2 * h]);
          x = w_max_f32(x, s[a][j][2 * h + 1]);
        }
        x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 1)));
        x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 2)));
        x = w_max_f32(x, top[a][h]);
        const float base = x == -__builtin_inff() ? 0.0f : x;
        if (!(x == top[a][h])) {  // rare after the first tiles
          const float old = w_exp2((top[a][h] - base) * 0.1803368777036667f);
          total[a][h] *= old;
          #pragma unroll
          for (int j = 0; j < 8; ++j) {
            o[a][j][2 * h] *= old;
            o[a][j][2 * h + 1] *= old;
          }
        }
        top[a][h] = x;
        #pragma unroll
        for (int j = 0; j < 2; ++j)
          #pragma unroll
          for (int e = 0; e < 2; ++e) {
            s[a][j][2 * h + e] = w_exp2((s[a][j][2 * h + e] - base) * 0.1803368777036667f);
            total[a][h] += s[a][j][2 * h + e];
          }
      }
    // sums of products are, rounded, the left operand of the next product as they stand
    #pragma unroll
    for (int q = 0; q < 1; ++q) {
      u32 w[1][4];
      #pragma unroll
      for (int a = 0; a < 1; ++a) {
        w[a][0] = w_narrow2_bf16(s[a][2 * q][0], s[a][2 * q][1]);
        w[a][1] = w_narrow2_bf16(s[a][2 * q][2], s[a][2 * q][3]);
        w[a][2] = w_narrow2_bf16(s[a][2 * q + 1][0], s[a][2 * q + 1][1]);
        w[a][3] = w_narrow2_bf16(s[a][2 * q + 1][2], s[a][2 * q + 1][3]);
      }
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 f[4];
        w_matrices_transposed(f, here + 2304u + (u32)((key0 + q * 16 + (lane & 15)) * 144 + j * 32 + (lane >> 4) * 16));
        #pragma unroll
        for (int a = 0; a < 1; ++a) {
          w_mma_bf16(o[a][2 * j], w[a], f[0], f[1]);
          w_mma_bf16(o[a][2 * j + 1], w[a], f[2], f[3]);
        }
      }
    }
  }
  // warps that shared the keys of a row meet in shared memory
  w_arrived<0>();
  role.sync();
  float* const sums = (float*)sm;
  float* const tops = sums + 1152, * const totals = tops + 16;
  (void)tops;
  #pragma unroll
  for (int a = 0; a < 1; ++a)
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = total[a][h];
      x += __uint_as_float(w_shfl_word(__float_as_uint(x), 1));
      x += __uint_as_float(w_shfl_word(__float_as_uint(x), 2));
      const int r = row0 + a * 16 + (lane >> 2) + h * 8;
      if ((lane & 3) == 0) {
        totals[r] = x;
        tops[r] = top[a][h];
      }
      #pragma unroll
      for (int j = 0; j < 8; ++j)
        *(float2*)(sums + r * 72 + j * 8 + (lane & 3) * 2) = make_float2(o[a][j][2 * h], o[a][j][2 * h + 1]);
    }
  role.sync();
  for (int x = t; x < 128; x += 32) {
    const int r = x / 8, c = x % 8 * 8, m = m0 + r;
    if (m < 37) {
      float v[8], all;
      all = totals[r];
      #pragma unroll
      for (int e = 0; e < 8; ++e) v[e] = sums[r * 72 + c + e];
      if (c == 0) {
        const float top = tops[r];
        *((float*)out1 + (z * 37 + m)) = w_log_sum(top * 0.125f, all);
      }
      if (all == 0.0f) all = 1.0f;
      all = 1.0f / all;
      #pragma unroll
      for (int e = 0; e < 8; ++e) v[e] *= all;
      u16* const y = (u16*)out0 + (z % 2 * 64 + z / 2 * 4736 + m * 128 + c);
      *(uint4*)(y) = make_uint4(w_narrow2_bf16(v[0], v[1]), w_narrow2_bf16(v[2], v[3]), w_narrow2_bf16(v[4], v[5]),
          w_narrow2_bf16(v[6], v[7]));
    }
  }
}
