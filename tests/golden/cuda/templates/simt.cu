// test_templates LINES tt
// {"generator": "cuda", "params": [["bk", 32], ["bm", 16], ["bn", 16], ["cluster", false], ["group", false], ["split", 1], ["stages", 5], ["template", "simt"], ["wk", 2], ["wm", 16], ["wn", 16]]}
// k: (128, 1, 1) x (64, 1, 1), 20496 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
extern "C" __global__ void __launch_bounds__(64) k(const void* __restrict__ in0, const void* __restrict__ in1,
    const void* __restrict__ in2, void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { TABLES = 20480, FLAG = 20480 };
  const u32 sb = w_shared(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int tn = role.block_x() % 16, m0 = role.block_x() / 16 * 16, n0 = tn * 16;
  const int g = role.block_z(), b = 0;
  (void)g; (void)b; (void)n0; (void)lane;
  const float* const A = (const float*)in0;
  const float* const W = (const float*)in1;
  const int first = role.block_y(), last = role.block_y() + 1;
  const int a_at = m0 + t % 4 * 4;
  const float* a_first;
  {
    const int at = a_at;
    a_first = A + at + t / 4 * 128;
  }

  auto fill_a = [&](int kb, u32 to) {
    const float* const from = a_first + kb * 4096;
    _Pragma("unroll")
    for (int i = 0; i < 2; ++i) {
      const int x = t + i * 64;
      {
        w_copy16(to + x * 16, from + i * 2048);
      }
    }
  };
  auto fill_w = [&](int kb, u32 to) {
    const int k = kb * 32 + t % 8 * 4;
    _Pragma("unroll")
    for (int i = 0; i < 2; ++i) {
      const int x = t + i * 64;
      {
        const int n = n0 + x / 8;
        w_copy16(to + (x / 8 * 8 + ((t % 8) ^ ((x / 8) & 7))) * 16, W + n * 32 + k);
      }
    }
  };
  auto store_a = [&](u32 to) { (void)to; };
  auto store_w = [&](u32 to) { (void)to; };
  const int wk = warp, row0 = 0, col0 = 0;
  (void)wk;
  float acc[4][2];
  #pragma unroll
  for (int i = 0; i < 4; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j) acc[i][j] = 0.0f;
  const u32 at_x = (u32)((row0 + (lane >> 3) * 4) * 4 + wk * 1024);
  u32 at_y[4];
  #pragma unroll
  for (int q = 0; q < 4; ++q) at_y[q] = (u32)((col0 + (lane & 7)) * 128 + ((wk * 4 + q) ^ (lane & 7)) * 16);
  auto multiply = [&](u32 a, u32 w) {
    const unsigned char* const fa = sm + (a - sb);
    const unsigned char* const fw = sm + (w - sb);
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
      float x[4][4];
      float4 y[2];
      #pragma unroll
      for (int j = 0; j < 2; ++j) y[j] = *(const float4*)(fw + at_y[q] + 1024 * j);
      #pragma unroll
      for (int e = 0; e < 4; ++e)
        #pragma unroll
        for (int i = 0; i < 1; ++i) {
          const float4 r = *(const float4*)(fa + at_x + (q * 4 + e) * 64 + i * 64);
          x[e][4 * i] = r.x;
          x[e][4 * i + 1] = r.y;
          x[e][4 * i + 2] = r.z;
          x[e][4 * i + 3] = r.w;
        }
      #pragma unroll
      for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < 2; ++j) acc[i][j] = fmaf(x[0][i], y[j].x, acc[i][j]);
      #pragma unroll
      for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < 2; ++j) acc[i][j] = fmaf(x[1][i], y[j].y, acc[i][j]);
      #pragma unroll
      for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < 2; ++j) acc[i][j] = fmaf(x[2][i], y[j].z, acc[i][j]);
      #pragma unroll
      for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < 2; ++j) acc[i][j] = fmaf(x[3][i], y[j].w, acc[i][j]);
    }
  };
  if (t < 2) {
    const int n = n0 + t * 32;
    w_prefetch((const float*)in2 + (n < 256 ? n : 255));
  }
  // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
  role.pdl_wait();
  role.pdl_trigger();
  for (int i = 0; i < 4; ++i) {
    if (first + i < last) {
      fill_w(first + i, sb + (u32)((i % 5) * 4096) + 2048);
      store_w(sb + (u32)((i % 5) * 4096) + 2048);
      fill_a(first + i, sb + (u32)((i % 5) * 4096));
      store_a(sb + (u32)((i % 5) * 4096));
    }
    w_commit();
  }
  // multistage pipeline: copies run ahead of products, one barrier for each k-tile
  for (int i = 0; i < last - first; ++i) {
    w_arrived<3>();
    role.sync();
    const u32 here = sb + (u32)((i % 5) * 4096), to = sb + (u32)((i + 4) % 5 * 4096);
    const bool more = first + i + 4 < last;
    if (more) {
      fill_w(first + i + 4, to + 2048);
      fill_a(first + i + 4, to);
    }
    w_commit();
    multiply(here, here + 2048);
    if (more) {
      store_a(to);
      store_w(to + 2048);
    }
  }
  w_arrived<0>();
  role.sync();
  // sums go through shared memory, so that neighbouring threads finish neighbouring columns
  float* const sums = (float*)sm;
  float* const mine = sums + wk * 384;
  #pragma unroll
  for (int i = 0; i < 4; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j)
      mine[(row0 + i / 4 * 16 + (lane >> 3) * 4 + i % 4) * 24 + col0 + j * 8 + (lane & 7)] = acc[i][j];
  role.sync();
  for (int x = t; x < 64; x += 64) {
    const int r = x / 4, q = x % 4 * 4;
    const int m = m0 + r, n = n0 + q;
    {
      float acc[4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[i] = sums[r * 24 + q + i];
        #pragma unroll
        for (int y = 1; y < 2; ++y) acc[i] += sums[(y * 16 + r) * 24 + q + i];
      }
      const float* const x0p = (const float*)in2 + n;
      w_f32 x0[4];
      {
        const float4 h = *(const float4*)(x0p);
        x0[0] = h.x;
        x0[1] = h.y;
        x0[2] = h.z;
        x0[3] = h.w;
      }
      const w_f32 e1_0 = (acc[0] + x0[0]);
      const w_f32 e1_1 = (acc[1] + x0[1]);
      const w_f32 e1_2 = (acc[2] + x0[2]);
      const w_f32 e1_3 = (acc[3] + x0[3]);
      float* const y0 = (float*)out0 + (m * 256 + n);
      *(float4*)(y0) = make_float4(e1_0, e1_1, e1_2, e1_3);
    }
  }
}
