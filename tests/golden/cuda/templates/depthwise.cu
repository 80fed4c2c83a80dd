// test_templates CASES depthwise, row-major
// {"generator": "cuda", "params": [["template", "depthwise"], ["th", 1], ["threads", 64], ["tw", 1], ["width", 1]]}
// k_pack: (1, 1, 1) x (256, 1, 1), 0 bytes
// k: (15, 1, 1) x (64, 1, 1), 0 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
extern "C" __global__ void __launch_bounds__(64) k(const void* __restrict__ in0, const void* __restrict__ in2,
    const void* __restrict__ pk, void* __restrict__ out0) {
  static constexpr w_solo role{};
  const int i = role.block_x() * 64 + role.thread();
  const int tx = i % 10, ty = i / 10 % 9, cv = i / 90 % 10, img = i / 900;
  const int n = cv, g = 0, b = 0;
  (void)g; (void)b;
  const u16* const w = (const u16*)pk + n * 9;
  u16 k0;
  w_read_if(k0, w, i < 900);
  u16 k1;
  w_read_if(k1, w + 1, i < 900);
  u16 k2;
  w_read_if(k2, w + 2, i < 900);
  u16 k3;
  w_read_if(k3, w + 3, i < 900);
  u16 k4;
  w_read_if(k4, w + 4, i < 900);
  u16 k5;
  w_read_if(k5, w + 5, i < 900);
  u16 k6;
  w_read_if(k6, w + 6, i < 900);
  u16 k7;
  w_read_if(k7, w + 7, i < 900);
  u16 k8;
  w_read_if(k8, w + 8, i < 900);
  role.pdl_wait();
  role.pdl_trigger();
  const bool live = i < 900;
  const int y0 = ty - 1, x0 = tx - 1;
  const u16* const A = (const u16*)in0 + img * 900 + y0 * 10 + x0 + n * 90;
  float acc[1][1];
  #pragma unroll
  for (int q = 0; q < 1; ++q)
    #pragma unroll
    for (int e = 0; e < 1; ++e) acc[q][e] = 0.0f;
  const bool in_x0 = (u32)x0 < 10u;
  const bool in_x1 = (u32)(x0 + 1) < 10u;
  const bool in_x2 = (u32)(x0 + 2) < 10u;
  {
    const bool in_y0 = (u32)y0 < 9u;
    u16 h0_0;
    w_read_if(h0_0, A, live && in_y0 && in_x0);
    u16 h0_1;
    w_read_if(h0_1, A + 1, live && in_y0 && in_x1);
    u16 h0_2;
    w_read_if(h0_2, A + 2, live && in_y0 && in_x2);
    const bool in_y1 = (u32)(y0 + 1) < 9u;
    u16 h1_0;
    w_read_if(h1_0, A + 10, live && in_y1 && in_x0);
    u16 h1_1;
    w_read_if(h1_1, A + 11, live && in_y1 && in_x1);
    u16 h1_2;
    w_read_if(h1_2, A + 12, live && in_y1 && in_x2);
    const bool in_y2 = (u32)(y0 + 2) < 9u;
    u16 h2_0;
    w_read_if(h2_0, A + 20, live && in_y2 && in_x0);
    u16 h2_1;
    w_read_if(h2_1, A + 21, live && in_y2 && in_x1);
    u16 h2_2;
    w_read_if(h2_2, A + 22, live && in_y2 && in_x2);
    w_together();
    {
      float v[1];
      v[0] = w_unpack_f16(h0_0).x;
      {
        float f[1];
        f[0] = w_unpack_f16(k0).x;
        #pragma unroll
        for (int e = 0; e < 1; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
      }
    }
    {
      float v[1];
      v[0] = w_unpack_f16(h0_1).x;
      {
        float f[1];
        f[0] = w_unpack_f16(k1).x;
        #pragma unroll
        for (int e = 0; e < 1; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
      }
    }
    {
      float v[1];
      v[0] = w_unpack_f16(h0_2).x;
      {
        float f[1];
        f[0] = w_unpack_f16(k2).x;
        #pragma unroll
        for (int e = 0; e < 1; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
      }
    }
    {
      float v[1];
      v[0] = w_unpack_f16(h1_0).x;
      {
        float f[1];
        f[0] = w_unpack_f16(k3).x;
        #pragma unroll
        for (int e = 0; e < 1; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
      }
    }
    {
      float v[1];
      v[0] = w_unpack_f16(h1_1).x;
      {
        float f[1];
        f[0] = w_unpack_f16(k4).x;
        #pragma unroll
        for (int e = 0; e < 1; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
      }
    }
    {
      float v[1];
      v[0] = w_unpack_f16(h1_2).x;
      {
        float f[1];
        f[0] = w_unpack_f16(k5).x;
        #pragma unroll
        for (int e = 0; e < 1; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
      }
    }
    {
      float v[1];
      v[0] = w_unpack_f16(h2_0).x;
      {
        float f[1];
        f[0] = w_unpack_f16(k6).x;
        #pragma unroll
        for (int e = 0; e < 1; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
      }
    }
    {
      float v[1];
      v[0] = w_unpack_f16(h2_1).x;
      {
        float f[1];
        f[0] = w_unpack_f16(k7).x;
        #pragma unroll
        for (int e = 0; e < 1; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
      }
    }
    {
      float v[1];
      v[0] = w_unpack_f16(h2_2).x;
      {
        float f[1];
        f[0] = w_unpack_f16(k8).x;
        #pragma unroll
        for (int e = 0; e < 1; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
      }
    }
  }
  auto finish = [&](const float (&acc)[1], int m) {
    const u16* const x1p = (const u16*)in2 + n;
    const w_f32 x1 = w_unpack_f16(*(x1p)).x;
    const w_f32 e2_0 = (acc[0] + x1);
    const w_f32 e3_0 = w_max_const(e2_0, 0.0f);
    u16* const y0 = (u16*)out0 + (m + n * 90);
    *(y0) = (u16)w_narrow2_f16(e3_0, 0.0f);
  };
  if (!live) return;
  finish(acc[0], (img * 9 + ty) * 10 + tx);
}
extern "C" __global__ void k_pack(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 90u) return;
  const int tap = i % 9, n = i / 9;
  ((u16*)pk)[i] = ((const u16*)w)[n * 9 + tap / 3 * 3 + tap % 3];
}
