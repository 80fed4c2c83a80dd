// test_mlp CASES no bias
// {"generator": "cuda", "params": [["blocks", 2], ["early", false], ["fixed", 0], ["flow", 0], ["group", false], ["keep", false], ["near", false], ["pace", 0], ["resident", 1], ["stages", 0], ["template", "mlp"], ["tiles", 1], ["turns", false], ["warps", 1]]}
// k_pack: (4, 1, 1) x (256, 1, 1), 0 bytes
// k: (2, 1, 1) x (32, 1, 1), 2048 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
// weft_cuda_mlp.h
extern "C" __global__ void k_pack(const void* __restrict__ in1, const void* __restrict__ in2, void* __restrict__ pk) {
  static constexpr w_solo role{};
  u32 i = role.block_x() * 256u + role.thread();
  // fragments as mma.sync holds them, two neighbouring tiles of 8 columns side by side
  if (i < 512u) {
    const u32 pn = i / 256 % 2 * 16 + i % 8 / 4 * 8 + i % 256 / 32,
        pk_ = i / 512 * 16 + i % 4 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
    const u32 n = pn;
    const u32 k = (pk_ / 16 * 16 + pk_ % 8 / 2 * 4 + pk_ % 16 / 8 * 2 + pk_ % 2);
    u16 v = 0;
    if (n < 32 && k < 16) v = ((const u16*)in1)[k + n * 16];
    ((u16*)((char*)pk))[i] = v;
    return;
  }
  i -= 512u;
  // fragments as mma.sync holds them, two neighbouring tiles of 8 columns side by side
  if (i < 512u) {
    const u32 pn = i % 8 / 4 * 8 + i % 256 / 32, pk_ = i / 256 * 16 + i % 4 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
    const u32 n = pn;
    const u32 k = (pk_ < 32u ? pk_ : 32u);
    u16 v = 0;
    if (n < 8 && k < 32) v = ((const u16*)in2)[k + n * 32];
    ((u16*)((char*)pk + 1024))[i] = v;
    return;
  }
  i -= 512u;
}
extern "C" __global__ void __launch_bounds__(32, 1) k(const void* __restrict__ in0, const void* __restrict__ pk,
    void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5, q = lane & 3, g = lane >> 2;
  const int owner = warp;
  const u16* const x = (const u16*)in0;
  u16* const out = (u16*)out0;
  (void)q; (void)g;
  for (int i = t; i < 128; i += 32) w_copy16(w_shared(sm) + 16 * i, (const char*)pk + 16 * i);
  w_commit();
  w_arrived<0>();
  role.sync();
  // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
  role.pdl_wait();
  role.pdl_trigger();
  auto load = [&](int row, u32 (&to)[1][1][4]) {
    #pragma unroll
    for (int m = 0; m < 1; ++m)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + m * 16 + half * 8 + g;
        const u16* const from = x + (u64)(r < 17 ? r : 16) * 16;
        #pragma unroll
        for (int c = 0; c < 1; ++c) {
          uint2 w;
          w = *(const uint2*)(from + c * 16 + q * 4);
          to[m][c * 2 / 2][c * 2 % 2 * 2 + half] = w.x;
          to[m][(c * 2 + 1) / 2][(c * 2 + 1) % 2 * 2 + half] = w.y;
        }
      }
  };
  u32 h0[1][1][4];
  u32 ahead[1][1][4];
  load(((int)role.block_x() + owner * (int)role.blocks_x()) * 16, ahead);
  #pragma unroll 1
  for (int tile = role.block_x() + owner * role.blocks_x(); tile < 2; tile += role.blocks_x()) {
    const int row0 = tile * 16;
    #pragma unroll
    for (int m = 0; m < 1; ++m)
      #pragma unroll
      for (int k = 0; k < 1; ++k)
        #pragma unroll
        for (int e = 0; e < 4; ++e) h0[m][k][e] = ahead[m][k][e];
    load((tile + (int)role.blocks_x()) * 16, ahead);
    // layer 1: the sums of one layer are, rounded, the left operand of the next as they stand
    float d1[1][4][4];
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        d1[m][j][0] = 0.0f;
        d1[m][j][1] = 0.0f;
        d1[m][j][2] = 0.0f;
        d1[m][j][3] = 0.0f;
      }
    }
    #pragma unroll
    for (int k = 0; k < 1; ++k)
      #pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 w = *(const uint4*)(sm + ((k * 2 + j) * 32 + lane) * 16);
        #pragma unroll
        for (int m = 0; m < 1; ++m) {
          w_mma_f16(d1[m][2 * j], h0[m][k], w.x, w.y);
          w_mma_f16(d1[m][2 * j + 1], h0[m][k], w.z, w.w);
        }
      }
    u32 h6[1][2][4];
    #pragma unroll
    for (int m = 0; m < 1; ++m) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          h6[m][j / 2][j % 2 * 2 + half] = w_relu2_f16(d1[m][j][2 * half], d1[m][j][2 * half + 1]);
        }
      }
    }
    // layer 2: the sums of one layer are, rounded, the left operand of the next as they stand
    float d2[1][2][4];
    #pragma unroll
    for (int j = 0; j < 2; ++j) {
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        d2[m][j][0] = 0.0f;
        d2[m][j][1] = 0.0f;
        d2[m][j][2] = 0.0f;
        d2[m][j][3] = 0.0f;
      }
    }
    #pragma unroll
    for (int k = 0; k < 2; ++k)
      #pragma unroll
      for (int j = 0; j < 1; ++j) {
        const uint4 w = *(const uint4*)(sm + 1024 + ((k + j) * 32 + lane) * 16);
        #pragma unroll
        for (int m = 0; m < 1; ++m) {
          w_mma_f16(d2[m][2 * j], h6[m][k], w.x, w.y);
          w_mma_f16(d2[m][2 * j + 1], h6[m][k], w.z, w.w);
        }
      }
    #pragma unroll
    for (int m = 0; m < 1; ++m) {
      #pragma unroll
      for (int c = 0; c < 1; ++c) {
        float y[2][2];
        #pragma unroll
        for (int i = 0; i < 1; ++i) {
          const int j = c + i;
          #pragma unroll
          for (int half = 0; half < 2; ++half) {
            y[half][2 * i] = d2[m][j][2 * half];
            y[half][2 * i + 1] = d2[m][j][2 * half + 1];
          }
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row0 + m * 16 + half * 8 + g;
          if (r < 17) {
            u16* const to = out + (u64)r * 8 + c * 8;
            {
              *(u32*)(to + q * 2) = w_relu2_f16(y[half][0], y[half][1]);
            }
          }
        }
      }
    }
  }
}
