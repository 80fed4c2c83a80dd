// test_attention_gradient CASES packed
// {"generator": "cuda", "params": [["ctas", 2], ["template", "attention_gradient"], ["warps", 3]]}
// k: (4, 1, 1) x (96, 1, 1), 24960 bytes
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
// weft_cuda_attention_gradient.h
extern "C" __global__ void __launch_bounds__(96, 2) k(const void* __restrict__ in0, const void* __restrict__ in1,
    const void* __restrict__ in2, const void* __restrict__ in3, void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  const int t = role.thread(), lane = t % 32, warp = t / 32;
  const int z = role.block_x() / 2, head = role.block_x() % 2;
  const long long first0 = (long long)z * 2368 + head * 32;  // pairs of elements
  const long long first1 = (long long)z * 7104 + head * 32;  // pairs of elements
  const long long first2 = (long long)z * 7104 + head * 32 + 64;  // pairs of elements
  const long long first3 = (long long)z * 7104 + head * 32 + 128;  // pairs of elements
  const u32 q_at = w_shared(sm);
  const u32 g_at = q_at + 6144u, k_at = g_at + 6144u;
  const u32 v_at = k_at + 6144u;
  float* const logs = (float*)(sm + 24576);
  float* const deltas = logs + 48;
  role.pdl_wait();
  role.pdl_trigger();
  for (int i = t; i < 384; i += 96) {
    const int row = i / 8, c = i % 8;
    const bool in = row < 37;
    w_copy16(w_rows<64>::at(q_at, row, c), (const u32*)in1 + (in ? first1 + (long long)row * 192 + 4 * c : 0),
        in ? 16u : 0u);
  }
  for (int i = t; i < 384; i += 96) {
    const int row = i / 8, c = i % 8;
    const bool in = row < 37;
    w_copy16(w_rows<64>::at(g_at, row, c), (const u32*)in0 + (in ? first0 + (long long)row * 64 + 4 * c : 0),
        in ? 16u : 0u);
  }
  for (int i = t; i < 384; i += 96) {
    const int row = i / 8, c = i % 8;
    const bool in = row < 37;
    w_copy16(w_rows<64>::at(k_at, row, c), (const u32*)in1 + (in ? first2 + (long long)row * 192 + 4 * c : 0),
        in ? 16u : 0u);
  }
  for (int i = t; i < 384; i += 96) {
    const int row = i / 8, c = i % 8;
    const bool in = row < 37;
    w_copy16(w_rows<64>::at(v_at, row, c), (const u32*)in1 + (in ? first3 + (long long)row * 192 + 4 * c : 0),
        in ? 16u : 0u);
  }
  w_commit();
  uint4 results[4];
  #pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int i = t + u * 96, row = i / 8, c = i % 8;
    const bool in = row < 37;
    w_read_if(results[u], (const u32*)in2 + (in ? first0 + (long long)row * 64 + 4 * c : 0), in);
  }
  for (int i = t; i < 48; i += 96)
    logs[i] = i < 37 ? ((const float*)in3)[(z * 2 + head) * 37 + i] * 1.4426950408889634f : __builtin_inff();
  w_arrived<0>();
  #pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int i = t + u * 96, row = i / 8, c = i % 8;
    float delta = 0.0f;
    if (i < 384) delta = w_dot8<true>(results[u], *(const uint4*)(sm + (w_rows<64>::at(g_at, row, c) - q_at)));
    delta += w_shfl(delta, 1);
    delta += w_shfl(delta, 2);
    delta += w_shfl(delta, 4);
    if (c == 0 && i < 384) deltas[row] = delta;
  }
  role.sync();
  #pragma unroll 1
  for (int task = warp; task < 6; task += 3) {
    if (task < 3) {
      const int row0 = task * 16;
      u32 k[4][4], v[4][4];
      w_left<64>(k, k_at, row0, lane);
      w_left<64>(v, v_at, row0, lane);
      float dk[8][4] = {}, dv[8][4] = {};
      #pragma unroll 1
      for (int i = 0; i < 3; ++i) {
        float s[2][4] = {}, p[2][4] = {};
        w_scores<64, true>(s, k, q_at, i * 16, lane);
        w_scores<64, true>(p, v, g_at, i * 16, lane);
        #pragma unroll
        for (int n = 0; n < 2; ++n)
          #pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int at = i * 16 + 8 * n + 2 * (lane & 3) + e;
            const float log = logs[at], delta = deltas[at];
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
              float x = w_exp2(fmaf(s[n][2 * h + e], 0.18033688011112042f, -log));
              s[n][2 * h + e] = x;
              p[n][2 * h + e] = x * (p[n][2 * h + e] - delta);
            }
          }
        u32 a[4];
        w_as_left<true>(a, s);
        w_weighted<64, true>(dv, a, g_at, i * 16, lane);
        w_as_left<true>(a, p);
        w_weighted<64, true>(dk, a, q_at, i * 16, lane);
      }
      w_put_rows<64, true>((u32*)out0 + first2, dk, row0, 37, 192, 0.125f, lane);
      w_put_rows<64, true>((u32*)out0 + first3, dv, row0, 37, 192, 1.0f, lane);
    } else {
      const int row0 = (task - 3) * 16;
      u32 q[4][4], g[4][4];
      w_left<64>(q, q_at, row0, lane);
      w_left<64>(g, g_at, row0, lane);
      float dq[8][4] = {};
      float log[2], delta[2];
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        log[h] = logs[row0 + (lane >> 2) + 8 * h];
        delta[h] = deltas[row0 + (lane >> 2) + 8 * h];
      }
      #pragma unroll 1
      for (int j = 0; j < 3; ++j) {
        float s[2][4] = {}, p[2][4] = {};
        w_scores<64, true>(s, q, k_at, j * 16, lane);
        w_scores<64, true>(p, g, v_at, j * 16, lane);
        #pragma unroll
        for (int n = 0; n < 2; ++n)
          #pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int at = j * 16 + 8 * n + 2 * (lane & 3) + e;
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float x = w_exp2(fmaf(s[n][2 * h + e], 0.18033688011112042f, -log[h]))
                  * (p[n][2 * h + e] - delta[h]);
              p[n][2 * h + e] = at < 37 ? x : 0.0f;
            }
          }
        u32 a[4];
        w_as_left<true>(a, p);
        w_weighted<64, true>(dq, a, k_at, j * 16, lane);
      }
      w_put_rows<64, true>((u32*)out0 + first1, dq, row0, 37, 192, 0.125f, lane);
    }
  }
}
