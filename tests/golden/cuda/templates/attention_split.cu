// test_attention CASES keys shared by eight, bf16
// {"generator": "cuda", "params": [["mi", 1], ["nb", 16], ["split", 8], ["stages", 1], ["template", "attention_split"], ["wk", 4], ["wr", 1]]}
// k: (24, 1, 1) x (128, 1, 1), 15104 bytes
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
extern "C" __global__ void __launch_bounds__(128, 1) k(const void* __restrict__ in0, const void* __restrict__ in1,
    const void* __restrict__ in2, void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  const u32 sb = w_shared(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int rank = role.block_x() % 8, from = rank * 64, z = role.block_x() / 8 / 3, m0 = role.block_x() / 8 % 3 * 16;
  const int row0 = warp / 4 * 16, key0 = warp % 4 * 16;
  (void)z; (void)m0; (void)key0;
  auto fill_q = [&](int first, u32 to) {
    auto place = [&](int x, int& r, int& c) {
      r = x / 4;
      c = x % 4 * 8;
    };
    const u16* const base = (const u16*)in0;
    #pragma unroll
    for (int x = t; x < 64; x += 128) {
      int r, c;
      place(x, r, c);
      const bool inside = first + r < 40;
      const u16* const from = base + (inside ? (first + r) * 32 + c : 0);
      w_copy16(to + (u32)(r * 80 + c * 2), from, inside ? 16u : 0u);
    }
  };
  auto fill_k = [&](int first, u32 to) {
    auto place = [&](int x, int& r, int& c) {
      r = x / 4;
      c = x % 4 * 8;
    };
    const u16* const base = (const u16*)in1;
    #pragma unroll
    for (int x = t; x < 256; x += 128) {
      int r, c;
      place(x, r, c);
      const bool inside = first + r < 500;
      const u16* const from = base + (inside ? (first + r) * 32 + c : 0);
      w_copy16(to + (u32)(r * 80 + c * 2), from, inside ? 16u : 0u);
    }
  };
  auto fill_v = [&](int first, u32 to) {
    auto place = [&](int x, int& r, int& c) {
      r = x / 6;
      c = x % 6 * 8;
    };
    const u16* const base = (const u16*)in2;
    #pragma unroll
    for (int x = t; x < 384; x += 128) {
      int r, c;
      place(x, r, c);
      const bool inside = first + r < 500 && c < 40;
      const u16* const from = base + (inside ? (first + r) * 40 + c : 0);
      w_copy16(to + (u32)(r * 112 + c * 2), from, inside ? 16u : 0u);
    }
  };
  float o[1][6][4], top[1][2], total[1][2];
  #pragma unroll
  for (int a = 0; a < 1; ++a) {
    #pragma unroll
    for (int j = 0; j < 6; ++j)
      #pragma unroll
      for (int e = 0; e < 4; ++e) o[a][j][e] = 0.0f;
    top[a][0] = top[a][1] = -__builtin_inff();
    total[a][0] = total[a][1] = 0.0f;
  }
  role.pdl_wait();
  role.pdl_trigger();
  // groups of copies: queries with the first keys, their values, the next keys, ...
  fill_q(m0, sb);
  fill_k(from, sb + 1280u);
  w_commit();
  fill_v(from, sb + 6400u);
  w_commit();
  u32 fq[1][2][4];
  {
    const int i = 0;
    (void)i;
    if (i == 0) w_arrived<1>();
    role.sync();
    #pragma unroll
    for (int a = 0; a < 1; ++a)
      #pragma unroll
      for (int kk = 0; kk < 2; ++kk)
        w_matrices(fq[a][kk], sb + (u32)((row0 + a * 16 + (lane & 15)) * 80 + kk * 32 + (lane >> 4) * 16));
    const u32 here = sb + 1280u + (u32)(i * 12288);
    const int n0 = from + i * 64 + key0;
    float s[1][2][4];
    if (n0 < 500) {
      #pragma unroll
      for (int a = 0; a < 1; ++a)
        #pragma unroll
        for (int j = 0; j < 2; ++j)
          #pragma unroll
          for (int e = 0; e < 4; ++e) s[a][j][e] = 0.0f;
      #pragma unroll
      for (int kk = 0; kk < 2; ++kk) {
        #pragma unroll
        for (int j = 0; j < 1; ++j) {
          u32 f[4];
          w_matrices(f, here + (u32)((key0 + j * 16 + (lane & 7) + ((lane >> 4) << 3)) * 80 + kk * 32
              + ((lane >> 3) & 1) * 16));
          #pragma unroll
          for (int a = 0; a < 1; ++a) {
            w_mma_bf16(s[a][2 * j], fq[a][kk], f[0], f[1]);
            w_mma_bf16(s[a][2 * j + 1], fq[a][kk], f[2], f[3]);
          }
        }
      }
      #pragma unroll
      for (int j = 0; j < 2; ++j)
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = n0 + j * 8 + (lane & 3) * 2 + (e & 1);
          #pragma unroll
          for (int a = 0; a < 1; ++a) {
            if (at >= 500) s[a][j][e] = -__builtin_inff();
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
          const float base = x == -__builtin_inff() ? 0.0f : x;
          top[a][h] = x;
          #pragma unroll
          for (int j = 0; j < 2; ++j)
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
              s[a][j][2 * h + e] = w_exp2((s[a][j][2 * h + e] - base) * 0.255034863948822f);
              total[a][h] += s[a][j][2 * h + e];
            }
        }
    }
    if (i == 0) w_arrived<0>();
    role.sync();
    if (n0 < 500) {
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
        for (int j = 0; j < 3; ++j) {
          u32 f[4];
          w_matrices_transposed(f, here + 5120u + (u32)((key0 + q * 16 + (lane & 15)) * 112 + j * 32
              + (lane >> 4) * 16));
          #pragma unroll
          for (int a = 0; a < 1; ++a) {
            w_mma_bf16(o[a][2 * j], w[a], f[0], f[1]);
            w_mma_bf16(o[a][2 * j + 1], w[a], f[2], f[3]);
          }
        }
      }
    }
  }
  // warps that shared the keys of a row meet in shared memory
  w_arrived<0>();
  role.sync();
  float* const sums = (float*)sm;
  float* const tops = sums + 3584, * const totals = tops + 64;
  (void)tops;
  #pragma unroll
  for (int a = 0; a < 1; ++a)
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = total[a][h];
      x += __uint_as_float(w_shfl_word(__float_as_uint(x), 1));
      x += __uint_as_float(w_shfl_word(__float_as_uint(x), 2));
      const int r = warp % 4 * 16 + row0 + a * 16 + (lane >> 2) + h * 8;
      if ((lane & 3) == 0) {
        totals[r] = x;
        tops[r] = top[a][h];
      }
      #pragma unroll
      for (int j = 0; j < 6; ++j)
        *(float2*)(sums + r * 56 + j * 8 + (lane & 3) * 2) = make_float2(o[a][j][2 * h], o[a][j][2 * h + 1]);
    }
  role.sync();
  float* const ends = totals + 64;
  for (int x = t; x < 192; x += 128) {
    const int r = x / 12, c = x % 12 * 4;
    float top = tops[r], all = 0.0f;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    #pragma unroll
    for (int y = 0; y < 4; ++y) top = w_max_f32(top, tops[y * 16 + r]);
    const float base = top == -__builtin_inff() ? 0.0f : top;
    #pragma unroll
    for (int y = 0; y < 4; ++y) {
      const float f = w_exp2((tops[y * 16 + r] - base) * 0.255034863948822f);
      const float4 u = *(const float4*)(sums + (y * 16 + r) * 56 + c);
      all = fmaf(totals[y * 16 + r], f, all);
      v.x = fmaf(u.x, f, v.x);
      v.y = fmaf(u.y, f, v.y);
      v.z = fmaf(u.z, f, v.z);
      v.w = fmaf(u.w, f, v.w);
    }
    *(float4*)(sums + r * 56 + c) = v;
    if (c == 0) *(float4*)(ends + 4 * r) = make_float4(top, all, 0.0f, 0.0f);
  }
  w_together();
  w_cluster_sync();
  // keys split over a cluster: each CTA finishes its share, in order, through distributed shared memory
  for (int x = rank * 128 + t; x < 160; x += 1024) {
    const int r = x / 10, c = x % 10 * 4, m = m0 + r;
    if (m < 40) {
      float v[4], all = 0.0f, top = -__builtin_inff();
      float4 e[8];
      #pragma unroll
      for (int y = 0; y < 8; ++y) {
        e[y] = w_read_cluster(w_shared(ends + 4 * r), y);
        top = w_max_f32(top, e[y].x);
      }
      const float base = top == -__builtin_inff() ? 0.0f : top;
      #pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = 0.0f;
      #pragma unroll
      for (int y = 0; y < 8; ++y) {
        const float f = w_exp2((e[y].x - base) * 0.255034863948822f);
        const float4 u = w_read_cluster(w_shared(sums + r * 56 + c), y);
        all = fmaf(e[y].y, f, all);
        v[0] = fmaf(u.x, f, v[0]);
        v[1] = fmaf(u.y, f, v[1]);
        v[2] = fmaf(u.z, f, v[2]);
        v[3] = fmaf(u.w, f, v[3]);
      }
      all = 1.0f / all;
      #pragma unroll
      for (int i = 0; i < 4; ++i) v[i] *= all;
      u16* const y = (u16*)out0 + (m * 40 + c);
      *(uint2*)(y) = make_uint2(w_narrow2_bf16(v[0], v[1]), w_narrow2_bf16(v[2], v[3]));
    }
  }
  w_together();
  w_cluster_leave();
}
