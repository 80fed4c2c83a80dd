// test_group_conv CASES warps split K
// {"generator": "cuda", "params": [["cluster", false], ["gs", 3], ["split", 1], ["stages", 1], ["taps", 9], ["template", "group_conv"], ["th", 2], ["tw", 7], ["wk", 2], ["wm", 16], ["wn", 24]]}
// k_pack: (63, 1, 1) x (256, 1, 1), 0 bytes
// k: (4, 1, 1) x (192, 1, 1), 37472 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
extern "C" __global__ void __launch_bounds__(192) k(const void* __restrict__ in0, const void* __restrict__ in2,
    const void* __restrict__ pk, void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  enum { TABLES = 37440, TAPS = 37440, ZERO = 37440, FLAG = 37456 };
  const u32 sb = w_shared(sm);
  (void)sb;
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  const int img = role.block_x() / 4, y0 = role.block_x() % 4 * 2, x0 = 0;
  const int n0 = role.block_z() * 72, g = 0, b = 0;
  (void)g; (void)b;
  const u16* const A = (const u16*)in0 + img * 3528 + role.block_z() * 72;
  const char* const W = (const char*)pk + (long long)role.block_z() * 32256;
  const int first = role.block_y(), last = role.block_y() + 1;
  auto fill_w = [&](int kb, u32 to) {
    const char* const from = W + kb * 32256;
    _Pragma("unroll")
    for (int i = 0; i < 11; ++i) {
      const int x = t + i * 192;
      if (x < 2016) { w_copy16(to + x * 16, from + x * 16); }
    }
  };
  _Pragma("unroll")
  for (int i = 0; i < 1; ++i) {
    if (first + i < last) fill_w(first + i, sb + 5184);
  }
  if (t == 0) *(uint4*)(sm + ZERO) = make_uint4(0, 0, 0, 0);
  // the halo tile of all groups of the CTA: every pixel once, whichever taps read it
  int ao[2], at[2];
  _Pragma("unroll")
  for (int i = 0; i < 2; ++i) {
    const int x = t + i * 192;
    if (x < 324) {
      const int pix = x / 9, iy = pix / 9, ix = pix % 9;
      at[i] = iy * 1296 + ix * 144 + (x % 9) * 16;
      const int py = y0 + iy, px = x0 + ix;
      ao[i] = (u32)(py - 1) < 7u && (u32)(px - 1) < 7u ? (py - 1) * 504 + (px - 1) * 72 : -1;
    }
  }
  auto fill_a = [&]() {
    _Pragma("unroll")
    for (int i = 0; i < 2; ++i) {
      const int x = t + i * 192;
      if (x < 324) { w_copy16(sb + at[i], (ao[i] >= 0 ? A + ao[i] + (x % 9) * 8 : A), (ao[i] >= 0 ? 16u : 0u)); }
    }
  };
  const int wk = warp / 3, group = warp % 3;
  const int row0 = 0, eight0 = 0;
  (void)wk; (void)group;
  u32 from[1][1];
  #pragma unroll
  for (int i = 0; i < 1; ++i) {
    {
      int m = row0 + i * 16 + (lane & 15);
      m = m < 14 ? m : 0;
      from[i][0] = (u32)(m / 7 * 1296 + m % 7 * 144 + group * 48 + ((lane >> 4) * 16));
    }
  }
  float acc[1][3][4];
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 3; ++j)
      #pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0f;
  auto multiply = [&](int far, u32 w) {
    const uint2* const fragments = (const uint2*)(sm + (w - sb)) + (group * 14 * 96 + eight0 * 32 + lane);
    const u32 here = sb + far;
    const bool high = lane >= 16;
    (void)high;
    if (wk == 0) {
      u32 fa0[1][4], fa1[1][4];
      uint2 fw0[3], fw1[3];
      w_matrices(fa0[0], here + from[0][0]);
      fw0[0] = fragments[0];
      fw0[1] = fragments[32];
      fw0[2] = fragments[64];
      {
        const u32 off = here + (high ? 128u : 32u);
        w_matrices(fa1[0], from[0][0] + off);
      }
      fw1[0] = fragments[96];
      fw1[1] = fragments[128];
      fw1[2] = fragments[160];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa0[i], fw0[j].x, fw0[j].y);
      w_matrices(fa0[0], here + from[0][0] + 160);
      fw0[0] = fragments[192];
      fw0[1] = fragments[224];
      fw0[2] = fragments[256];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa1[i], fw1[j].x, fw1[j].y);
      w_matrices(fa1[0], here + from[0][0] + 288);
      fw1[0] = fragments[288];
      fw1[1] = fragments[320];
      fw1[2] = fragments[352];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa0[i], fw0[j].x, fw0[j].y);
      {
        const u32 off = here + (high ? 1280u : 320u);
        w_matrices(fa0[0], from[0][0] + off);
      }
      fw0[0] = fragments[384];
      fw0[1] = fragments[416];
      fw0[2] = fragments[448];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa1[i], fw1[j].x, fw1[j].y);
      w_matrices(fa1[0], here + from[0][0] + 1312);
      fw1[0] = fragments[480];
      fw1[1] = fragments[512];
      fw1[2] = fragments[544];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa0[i], fw0[j].x, fw0[j].y);
      w_matrices(fa0[0], here + from[0][0] + 1440);
      fw0[0] = fragments[576];
      fw0[1] = fragments[608];
      fw0[2] = fragments[640];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa1[i], fw1[j].x, fw1[j].y);
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa0[i], fw0[j].x, fw0[j].y);
    } else {
      u32 fa0[1][4], fa1[1][4];
      uint2 fw0[3], fw1[3];
      {
        const u32 off = here + (high ? 1568u : 1472u);
        w_matrices(fa0[0], from[0][0] + off);
      }
      fw0[0] = fragments[672];
      fw0[1] = fragments[704];
      fw0[2] = fragments[736];
      w_matrices(fa1[0], here + from[0][0] + 1600);
      fw1[0] = fragments[768];
      fw1[1] = fragments[800];
      fw1[2] = fragments[832];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa0[i], fw0[j].x, fw0[j].y);
      w_matrices(fa0[0], here + from[0][0] + 2592);
      fw0[0] = fragments[864];
      fw0[1] = fragments[896];
      fw0[2] = fragments[928];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa1[i], fw1[j].x, fw1[j].y);
      {
        const u32 off = here + (high ? 2720u : 2624u);
        w_matrices(fa1[0], from[0][0] + off);
      }
      fw1[0] = fragments[960];
      fw1[1] = fragments[992];
      fw1[2] = fragments[1024];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa0[i], fw0[j].x, fw0[j].y);
      w_matrices(fa0[0], here + from[0][0] + 2752);
      fw0[0] = fragments[1056];
      fw0[1] = fragments[1088];
      fw0[2] = fragments[1120];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa1[i], fw1[j].x, fw1[j].y);
      w_matrices(fa1[0], here + from[0][0] + 2880);
      fw1[0] = fragments[1152];
      fw1[1] = fragments[1184];
      fw1[2] = fragments[1216];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa0[i], fw0[j].x, fw0[j].y);
      w_matrices(fa0[0], high ? sb + ZERO : here + from[0][0] + 2912);
      fw0[0] = fragments[1248];
      fw0[1] = fragments[1280];
      fw0[2] = fragments[1312];
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa1[i], fw1[j].x, fw1[j].y);
      #pragma unroll
      for (int i = 0; i < 1; ++i)
        #pragma unroll
        for (int j = 0; j < 3; ++j) w_mma_f16(acc[i][j], fa0[i], fw0[j].x, fw0[j].y);
    }
  };
  if (t < 3) {
    const int n = n0 + t * 64;
    w_prefetch((const u16*)in2 + (n < 72 ? n : 71));
  }
  // the image waits for the kernels before; weights, which are constants, are on their way already
  role.pdl_wait();
  role.pdl_trigger();
  fill_a();
  w_commit();
  w_arrived<0>();
  role.sync();
  {
    const int i = 0;
    multiply(0, sb + 5184);
  }
  role.sync();
  float* const sums = (float*)sm;
  float* const mine = sums + wk * 1280 + group * 24;
  #pragma unroll
  for (int i = 0; i < 1; ++i)
    #pragma unroll
    for (int j = 0; j < 3; ++j) {
      float* const at = mine + (row0 + i * 16 + (lane >> 2)) * 80 + eight0 * 8 + (j * 8) + ((lane & 3) * 2);
      *(float2*)at = make_float2(acc[i][j][0], acc[i][j][1]);
      *(float2*)(at + 640) = make_float2(acc[i][j][2], acc[i][j][3]);
    }
  role.sync();
  for (int x = t; x < 144; x += 192) {
    const int r = x / 9, q = x % 9 * 8;
    const int m = (img * 7 + y0 + r / 7) * 7 + x0 + r % 7, n = n0 + q;
    if (r < 14 && y0 + r / 7 < 7) {
      float acc[8];
      #pragma unroll
      for (int i = 0; i < 8; ++i) {
        acc[i] = sums[r * 80 + q + i];
        #pragma unroll
        for (int y = 1; y < 2; ++y) acc[i] += sums[(y * 16 + r) * 80 + q + i];
      }
      const u16* const x1p = (const u16*)in2 + n;
      w_f32 x1[8];
      const uint4 x1w = *(const uint4*)(x1p);
      {
        const float2 h = w_unpack_f16(x1w.x);
        x1[0] = h.x;
        x1[1] = h.y;
      }
      {
        const float2 h = w_unpack_f16(x1w.y);
        x1[2] = h.x;
        x1[3] = h.y;
      }
      {
        const float2 h = w_unpack_f16(x1w.z);
        x1[4] = h.x;
        x1[5] = h.y;
      }
      {
        const float2 h = w_unpack_f16(x1w.w);
        x1[6] = h.x;
        x1[7] = h.y;
      }
      const w_f32 e2_0 = (acc[0] + x1[0]);
      const w_f32 e2_1 = (acc[1] + x1[1]);
      const w_f32 e2_2 = (acc[2] + x1[2]);
      const w_f32 e2_3 = (acc[3] + x1[3]);
      const w_f32 e2_4 = (acc[4] + x1[4]);
      const w_f32 e2_5 = (acc[5] + x1[5]);
      const w_f32 e2_6 = (acc[6] + x1[6]);
      const w_f32 e2_7 = (acc[7] + x1[7]);
      const w_f32 e3_0 = w_max_const(e2_0, 0.0f);
      const w_f32 e3_1 = w_max_const(e2_1, 0.0f);
      const w_f32 e3_2 = w_max_const(e2_2, 0.0f);
      const w_f32 e3_3 = w_max_const(e2_3, 0.0f);
      const w_f32 e3_4 = w_max_const(e2_4, 0.0f);
      const w_f32 e3_5 = w_max_const(e2_5, 0.0f);
      const w_f32 e3_6 = w_max_const(e2_6, 0.0f);
      const w_f32 e3_7 = w_max_const(e2_7, 0.0f);
      u16* const y0 = (u16*)out0 + (m * 72 + n);
      *(uint4*)(y0) = make_uint4(w_narrow2_f16(e3_0, e3_1), w_narrow2_f16(e3_2, e3_3), w_narrow2_f16(e3_4, e3_5),
          w_narrow2_f16(e3_6, e3_7));
    }
  }
}
extern "C" __global__ void k_pack(const void* __restrict__ w, void* __restrict__ pk) {
  static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 16128u) return;
  // lane and element of a fragment, as mma.sync holds them
  const int e = i % 4, lane = i / 4 % 32, q = lane & 3, n = i / 128 % 3 * 8 + (lane >> 2);
  const int step = i / 384 % 14, rest = i / 16128;
  const int group = rest * 3 + i / 5376 % 3, kb = 0;
  const int chunk = step * 2 + (e >> 1), local = chunk / 3, ch = chunk % 3 * 8 + q * 2 + (e & 1);
  const int tap = kb * 9 + local;
  u16 v = 0;
  if (group < 3 && n < 24 && local < 9) v = ((const u16*)w)[group * 5184 + n * 216 + tap / 3 * 3 + tap % 3 + ch * 9];
  ((u16*)pk)[i] = v;
}
