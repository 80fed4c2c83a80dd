// test_mlp CASES any 2
// {"generator": "cuda", "params": [["blocks", 1], ["columns", 32], ["group", false], ["stages", 3], ["template", "mlp_wide"], ["warps", 2]]}
// k_pack: (13, 1, 1) x (256, 1, 1), 0 bytes
// k: (1, 1, 1) x (64, 1, 1), 14528 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
// weft_cuda_mlp.h
extern "C" __global__ void k_pack(const void* __restrict__ in1, const void* __restrict__ in2,
    const void* __restrict__ in3, const void* __restrict__ in4, void* __restrict__ pk) {
  static constexpr w_solo role{};
  u32 i = role.block_x() * 256u + role.thread();
  // fragments as mma.sync holds them, two neighbouring tiles of 8 columns side by side
  if (i < 2048u) {
    const u32 pn = i / 256 % 2 * 16 + i % 8 / 4 * 8 + i % 256 / 32,
        pk_ = i / 512 * 16 + i % 4 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
    const u32 n = pn;
    const u32 k = pk_;
    u16 v = 0;
    if (n < 20 && k < 6) v = ((const u16*)in1)[k * 20 + n];
    ((u16*)((char*)pk))[i] = v;
    return;
  }
  i -= 2048u;
  // fragments as mma.sync holds them, two neighbouring tiles of 8 columns side by side
  if (i < 1024u) {
    const u32 pn = i % 8 / 4 * 8 + i % 256 / 32, pk_ = i / 256 * 16 + i % 4 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
    const u32 n = (pn / 16 * 16 + pn % 8 / 2 * 4 + pn % 16 / 8 * 2 + pn % 2);
    const u32 k = (pk_ < 20u ? pk_ : 20u);
    u16 v = 0;
    if (n < 16 && k < 20) v = ((const u16*)in3)[k * 16 + n];
    ((u16*)((char*)pk + 4096))[i] = v;
    return;
  }
  i -= 1024u;
  if (i < 32u) {
    float v = 0.0f;
    if (i < 20) v = (float)w_unpack_bf16(*((const u16*)in2 + i)).x;
    ((float*)((char*)pk + 6144))[i] = v;
    return;
  }
  i -= 32u;
  if (i < 16u) {
    float v = 0.0f;
    if ((i / 16 * 16 + i % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2) < 16)
      v = (float)w_unpack_bf16(*((const u16*)in4 + (i / 16 * 16 + i % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2))).x;
    ((float*)((char*)pk + 6272))[i] = v;
    return;
  }
  i -= 16u;
}
extern "C" __global__ void __launch_bounds__(64, 1) k(const void* __restrict__ in0, const void* __restrict__ pk,
    void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5, q = lane & 3, g = lane >> 2;
  const int owner = warp;
  const float* const x = (const float*)in0;
  float* const out = (float*)out0;
  (void)q; (void)g; (void)lane;
  // panels of weights come through a ring, in the order in which they are read
  for (int i = t; i < 12; i += 64) w_copy16(w_shared(sm) + 14336 + 16 * i, (const char*)pk + 6144 + 16 * i);
  const u32 total = ((3u - 1 - role.block_x()) / role.blocks_x() + 1) * 2u;
  u32 asked = 0, place = 0, at_asked = 0, slot_asked = 0, turn_asked = 0, slot = 0, parity = 0;
  (void)turn_asked; (void)parity;
  w_commit();
  auto ask = [&]() {
    if (asked < total) {
      const u32 size = at_asked <= 0u ? 4096u : (2048u);
      for (u32 i = 16 * t; i < size; i += 1024)
        w_copy16(w_shared(sm) + 2048 + (slot_asked * 4096u) + i, (const char*)pk + place + i);
      ++asked;
      place += size;
      if (++at_asked == 2) {
        at_asked = 0;
        place = 0;
      }
      if (++slot_asked == 3) {
        slot_asked = 0;
        ++turn_asked;
      }
    }
    w_commit();
  };
  for (int i = 0; i < 2; ++i) ask();
  w_arrived<2>();
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
        const float* const from = x + (u64)(r < 70 ? r : 69) * 6;
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
          float v[2];
          v[0] = v[1] = 0.0f;
          if (c * 8 + 2 * q < 6) {
            {
              float part[2];
              {
                const float2 h = *(const float2*)(from + c * 8 + q * 2);
                part[0] = h.x;
                part[1] = h.y;
              }
              #pragma unroll
              for (int e = 0; e < 2; ++e) v[e] = part[e];
            }
          }
          {
            const int j = c;
            const w_f32 e1_0 = w_round_bf16(v[0]);
            const w_f32 e1_1 = w_round_bf16(v[1]);
            to[m][j / 2][j % 2 * 2 + half] = w_narrow2_bf16((j * 8 + 7 < 6 || (j * 8) + (2 * q) < 6 ? e1_0 : 0.0f),
                (j * 8 + 7 < 6 || (j * 8) + (2 * q) + 1 < 6 ? e1_1 : 0.0f));
          }
        }
      }
  };
  #pragma unroll 1
  for (int turn = role.block_x(); turn < 3; turn += role.blocks_x()) {
    const int row0 = (turn * 2 + owner) * 16;
    {  // layer 1, 32 columns at a time
      u32 a[1][1][4];
      load(row0, a);
      {
        const int c = 0;
        float d[4][4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = c * 4 + i;
          (void)j;
          const float2 b = *(const float2*)(sm + 14336 + ((j * 8 + 2 * q) * 4));
          d[i][0] = b.x;
          d[i][1] = b.y;
          d[i][2] = b.x;
          d[i][3] = b.y;
        }
        {
          w_arrived<1>();
          role.sync();
          ask();
          #pragma unroll
          for (int k = 0; k < 1; ++k)
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint4 w = *(const uint4*)(sm + 2048 + (slot * 4096) + ((k * 2 + i) * 32 + lane) * 16);
              w_mma_bf16(d[2 * i], a[0][k], w.x, w.y);
              w_mma_bf16(d[2 * i + 1], a[0][k], w.z, w.w);
            }
          if (++slot == 3) {
            slot = 0;
            parity ^= 1;
          }
        }
        #pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int j0 = c * 4 + 2 * pair;
          u32 o6[4];
          #pragma unroll
          for (int b = 0; b < 2; ++b) {
            const int i = 2 * pair + b, j = j0 + b;
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
              o6[b * 2 + half] = w_narrow2_bf16(((j * 8) + (2 * q) < 20 ? d[i][2 * half] : 0.0f),
                  ((j * 8) + (2 * q) + 1 < 20 ? d[i][2 * half + 1] : 0.0f));
            }
          }
          *(uint4*)(sm + ((j0 / 2) * 64 + t) * 16) = make_uint4(o6[0], o6[1], o6[2], o6[3]);
        }
      }
    }
    {  // layer 2, 16 columns at a time
      u32 a[1][2][4];
      #pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint4 w = *(uint4*)(sm + (k * 64 + t) * 16);
        a[0][k][0] = w.x;
        a[0][k][1] = w.y;
        a[0][k][2] = w.z;
        a[0][k][3] = w.w;
      }
      {
        const int c = 0;
        float d[2][4];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int j = c * 2 + i;
          (void)j;
          const float2 b = *(const float2*)(sm + 14464 + ((j * 8 + 2 * q) * 4));
          d[i][0] = b.x;
          d[i][1] = b.y;
          d[i][2] = b.x;
          d[i][3] = b.y;
        }
        {
          w_arrived<1>();
          role.sync();
          ask();
          #pragma unroll
          for (int k = 0; k < 2; ++k)
            #pragma unroll
            for (int i = 0; i < 1; ++i) {
              const uint4 w = *(const uint4*)(sm + 2048 + (slot * 4096) + ((k + i) * 32 + lane) * 16);
              w_mma_bf16(d[2 * i], a[0][k], w.x, w.y);
              w_mma_bf16(d[2 * i + 1], a[0][k], w.z, w.w);
            }
          if (++slot == 3) {
            slot = 0;
            parity ^= 1;
          }
        }
        #pragma unroll
        for (int cc = 0; cc < 1; ++cc) {
          float y[2][4];
          const int column = c * 16 + cc * 16;
          #pragma unroll
          for (int b = 0; b < 2; ++b) {
            const int i = cc * 2 + b, j = c * 2 + i;
            const int j0 = j & ~1;
            (void)j0;
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
              const w_f32 e12_0 = d[i][2 * half];
              const w_f32 e12_1 = d[i][2 * half + 1];
              y[half][2 * b] = e12_0;
              y[half][2 * b + 1] = e12_1;
            }
          }
          #pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int r = row0 + half * 8 + g;
            if (r < 70 && column < 16) {
              float* const to = out + (u64)r * 16 + column;
              {
                *(float4*)(to + q * 4) = make_float4(y[half][0], y[half][1], y[half][2], y[half][3]);
              }
            }
          }
        }
      }
    }
  }
}
