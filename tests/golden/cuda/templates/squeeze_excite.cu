// test_squeeze_excite CASES regnet
// {"generator": "cuda", "params": [["ctas", 4], ["keep", true], ["template", "squeeze_excite"], ["threads", 256]]}
// k: (4, 1, 1) x (256, 1, 1), 11040 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
extern "C" __global__ void __launch_bounds__(256) k(const void* __restrict__ in0, const void* __restrict__ in1,
    const void* __restrict__ in2, const void* __restrict__ in3, const void* __restrict__ in4, void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { W1 = 0, W2 = 432, PARTS = 864, MEANS = 9056, OWN = 9344, HIDDEN = 9440, MINE = 9488, GATES = 9504,
      IMAGE = 9600, END = 11040 };
  const u32 sb = w_shared(sm);
  (void)sb;
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int rank = role.block_x(), img = role.block_y();
  (void)img;
  const int v0 = rank * 9 / 4, own = (rank + 1) * 9 / 4 - v0;
  const int h0 = rank * 9 / 4, rows = (rank + 1) * 9 / 4 - h0;
  float* const parts = (float*)(sm + PARTS);
  float* const means = (float*)(sm + MEANS);
  float* const mine = (float*)(sm + MINE);
  float* const hidden = (float*)(sm + HIDDEN);
  float* const mean = (float*)(sm + OWN);
  float* const gates = (float*)(sm + GATES);
  // this CTA's rows of both weights
  {
    const char* const w = (const char*)((const u16*)in1 + h0 * 72);
    for (int i = t; i < rows * 9; i += 256) w_copy16(sb + W1 + i * 16, w + i * 16);
  }
  {
    const char* const w = (const char*)((const u16*)in3 + v0 * 72);
    for (int i = t; i < own * 9; i += 256) w_copy16(sb + W2 + i * 16, w + i * 16);
  }
  w_commit();
  for (int i = t; i < 1; i += 256) w_prefetch((const u16*)in2 + i * 64);
  for (int i = t; i < 2; i += 256) w_prefetch((const u16*)in4 + i * 64);
  role.pdl_wait();
  role.pdl_trigger();
  const uint4* const X = (const uint4*)((const u16*)in0 + (img * 2160)) + v0;
  uint4* const Y = (uint4*)((u16*)out0 + (img * 2160)) + v0;
  const int v = t % own, p0 = t / own, step = 256 / own;
  float acc[8] = {};
  if (p0 < step)
    for (int first = p0; first < 30; first += 4 * step) {
      uint4 q[4];
      #pragma unroll
      for (int u = 0; u < 4; ++u) {
        const int at = first + u * step;
        w_read_if(q[u], X + (long long)at * 9 + v, at < 30);
      }
      #pragma unroll
      for (int u = 0; u < 4; ++u) {
        const int at = first + u * step;
        if (at < 30) {
          ((uint4*)(sm + IMAGE))[at * 3 + v] = q[u];
          float f[8];
          {
            const float2 h = w_unpack_f16(q[u].x);
            f[0] = h.x;
            f[1] = h.y;
          }
          {
            const float2 h = w_unpack_f16(q[u].y);
            f[2] = h.x;
            f[3] = h.y;
          }
          {
            const float2 h = w_unpack_f16(q[u].z);
            f[4] = h.x;
            f[5] = h.y;
          }
          {
            const float2 h = w_unpack_f16(q[u].w);
            f[6] = h.x;
            f[7] = h.y;
          }
          const w_f32 b0_e1 = f[0];
          acc[0] += b0_e1;
          const w_f32 b1_e1 = f[1];
          acc[1] += b1_e1;
          const w_f32 b2_e1 = f[2];
          acc[2] += b2_e1;
          const w_f32 b3_e1 = f[3];
          acc[3] += b3_e1;
          const w_f32 b4_e1 = f[4];
          acc[4] += b4_e1;
          const w_f32 b5_e1 = f[5];
          acc[5] += b5_e1;
          const w_f32 b6_e1 = f[6];
          acc[6] += b6_e1;
          const w_f32 b7_e1 = f[7];
          acc[7] += b7_e1;
        }
      }
    }
  if (p0 < step) {
    #pragma unroll
    for (int e = 0; e < 8; ++e) parts[(p0 * own + v) * 8 + e] = acc[e];
  }
  w_arrived<0>();
  role.sync();
  for (int i = 0; i < 1; ++i) {
    const int x = t + i * 256, c = x / 8, l = x % 8;
    float sum = 0.0f;
    if (c < own * 8)
      for (int k = l; k < step; k += 8) sum += parts[k * own * 8 + c];
    #pragma unroll
    for (int d = 4; d; d >>= 1) sum += w_shfl(sum, d);
    if (l == 0 && c < own * 8) {
      const w_f32 m_e5 = (sum * 0.03333333507180214f);
      const w_f32 m_e6 = w_round_f16(m_e5);
      mean[c] = m_e6;
    }
  }
  w_together();
  w_cluster_sync();
  for (int i = t; i < 72; i += 256) {
    int of = i / 8 * 4 / 9;
    while ((of + 1) * 9 / 4 <= i / 8) ++of;
    const int at = i - of * 9 / 4 * 8;
    means[i] = __uint_as_float(w_cluster_word((const unsigned*)mean + at, (unsigned)of));
  }
  role.sync();
  for (int j = warp; j < rows; j += 8) {
    float sum = 0.0f;
    for (int k = lane; k < 9; k += 32) {
      const uint4 q = ((const uint4*)(sm + W1))[j * 9 + k];
      float f[8];
      {
        const float2 h = w_unpack_f16(q.x);
        f[0] = h.x;
        f[1] = h.y;
      }
      {
        const float2 h = w_unpack_f16(q.y);
        f[2] = h.x;
        f[3] = h.y;
      }
      {
        const float2 h = w_unpack_f16(q.z);
        f[4] = h.x;
        f[5] = h.y;
      }
      {
        const float2 h = w_unpack_f16(q.w);
        f[6] = h.x;
        f[7] = h.y;
      }
      #pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(f[e], means[k * 8 + e], sum);
    }
    #pragma unroll
    for (int d = 16; d; d >>= 1) sum += w_shfl(sum, d);
    if (lane == 0) {
      const w_f32 h_v10 = w_unpack_f16(*((const u16*)in2 + (h0 + j))).x;
      const w_f32 h_e11 = (sum + h_v10);
      const w_f32 h_e14 = w_max_const(h_e11, 0.0f);
      mine[j] = h_e14;
    }
  }
  w_together();
  w_cluster_sync();
  for (int i = t; i < 9; i += 256) {
    int of = i * 4 / 9;
    while ((of + 1) * 9 / 4 <= i) ++of;
    const int at = i - of * 9 / 4;
    hidden[i] = __uint_as_float(w_cluster_word((const unsigned*)mine + at, (unsigned)of));
  }
  role.sync();
  for (int i = 0; i * 256 < own * 64; ++i) {
    const int x = t + i * 256, c = x / 8, l = x % 8;
    float sum = 0.0f;
    if (c < own * 8)
      for (int k = l; k < 9; k += 8) sum = fmaf(w_unpack_f16(*((const u16*)(sm + W2) + c * 9 + k)).x, hidden[k], sum);
    #pragma unroll
    for (int d = 4; d; d >>= 1) sum += w_shfl(sum, d);
    if (l == 0 && c < own * 8) {
      const w_f32 g_v18 = w_unpack_f16(*((const u16*)in4 + (v0 * 8 + c))).x;
      const w_f32 g_e19 = (sum + g_v18);
      const w_f32 g_e20 = g_e19;
      const w_f32 g_e21 = (-g_e20);
      const w_f32 g_e22 = w_exp(g_e21);
      const w_f32 g_e25 = (g_e22 + 1.0f);
      const w_f32 g_e26 = (1.0f / g_e25);
      const w_f32 g_e27 = w_round_f16(g_e26);
      gates[c] = g_e27;
    }
  }
  role.sync();
  float scale[8];
  #pragma unroll
  for (int e = 0; e < 8; ++e) scale[e] = gates[v * 8 + e];
  if (p0 < step)
    for (int at = p0; at < 30; at += step) {
      const uint4 q = ((const uint4*)(sm + IMAGE))[at * 3 + v];
      float f[8];
      {
        const float2 h = w_unpack_f16(q.x);
        f[0] = h.x;
        f[1] = h.y;
      }
      {
        const float2 h = w_unpack_f16(q.y);
        f[2] = h.x;
        f[3] = h.y;
      }
      {
        const float2 h = w_unpack_f16(q.z);
        f[4] = h.x;
        f[5] = h.y;
      }
      {
        const float2 h = w_unpack_f16(q.w);
        f[6] = h.x;
        f[7] = h.y;
      }
      const w_f32 s0_e29 = (f[0] * scale[0]);
      const w_f32 s1_e29 = (f[1] * scale[1]);
      const w_f32 s2_e29 = (f[2] * scale[2]);
      const w_f32 s3_e29 = (f[3] * scale[3]);
      const w_f32 s4_e29 = (f[4] * scale[4]);
      const w_f32 s5_e29 = (f[5] * scale[5]);
      const w_f32 s6_e29 = (f[6] * scale[6]);
      const w_f32 s7_e29 = (f[7] * scale[7]);
      *(uint4*)(Y + (long long)at * 9 + v) = make_uint4(w_narrow2_f16(s0_e29, s1_e29), w_narrow2_f16(s2_e29, s3_e29),
          w_narrow2_f16(s4_e29, s5_e29), w_narrow2_f16(s6_e29, s7_e29));
    }
  w_together();
  w_cluster_leave();
}
