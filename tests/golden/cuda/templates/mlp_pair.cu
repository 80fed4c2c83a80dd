// test_mlp CASES two blocks, two layers
// {"generator": "cuda", "params": [["blocks", 2], ["stages", 4], ["template", "mlp_pair"]]}
// k_pack: (162, 1, 1) x (256, 1, 1), 0 bytes
// k: (2, 1, 1) x (128, 1, 1), 83664 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
// weft_cuda_mlp.h
// weft_cuda_tma.h
#ifndef W_EMULATED
W_FN void w_wgmma_f16(float (&d)[32], const u32 (&a)[4], u64 b, int add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "  %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
      " {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) : "r"(a[0]), "r"(a[1]),
      "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}
#endif
#ifndef W_EMULATED
W_FN void w_wgmma_f16(float (&d)[64], const u32 (&a)[4], u64 b, int add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "  %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      "  %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      "  %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
      " {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) : "r"(a[0]), "r"(a[1]),
      "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}
#endif
extern "C" __global__ void k_pack(const void* __restrict__ in1, const void* __restrict__ in2,
    const void* __restrict__ in3, const void* __restrict__ in4, void* __restrict__ pk) {
  static constexpr w_solo role{};
  u32 i = role.block_x() * 256u + role.thread();
  // panels of 64 of the sum, rows of 128 bytes, swizzled as wgmma reads them
  if (i < 8192u) {
    const u32 pn = i % 8192 / 64, pk_ = i / 8192 * 64 + ((i % 8192 / 8 % 8) ^ (i % 8192 / 64 % 8)) * 8 + i % 8;
    const u32 n = pn;
    const u32 k = pk_;
    u16 v = 0;
    if (n < 128 && k < 3) v = ((const u16*)in1)[k * 128 + n];
    ((u16*)((char*)pk))[i] = v;
    return;
  }
  i -= 8192u;
  // panels of 64 of the sum, rows of 128 bytes, swizzled as wgmma reads them
  if (i < 32768u) {
    const u32 pn = i % 16384 / 64, pk_ = i / 16384 * 64 + ((i % 16384 / 8 % 8) ^ (i % 16384 / 64 % 8)) * 8 + i % 8;
    const u32 n = (pn / 32 * 32 + pn % 8 / 2 * 8 + pn % 32 / 8 * 2 + pn % 2);
    const u32 k = (pk_ < 128u ? pk_ : 128u);
    u16 v = 0;
    if (n < 256 && k < 128) v = ((const u16*)in3)[k * 256 + n];
    ((u16*)((char*)pk + 16384))[i] = v;
    return;
  }
  i -= 32768u;
  if (i < 128u) {
    float v = 0.0f;
    if (i < 128) v = (float)w_unpack_f16(*((const u16*)in2 + i)).x;
    ((float*)((char*)pk + 81920))[i] = v;
    return;
  }
  i -= 128u;
  if (i < 256u) {
    float v = 0.0f;
    if ((i / 32 * 32 + i % 8 / 2 * 8 + i % 32 / 8 * 2 + i % 2) < 256)
      v = (float)w_unpack_f16(*((const u16*)in4 + (i / 32 * 32 + i % 8 / 2 * 8 + i % 32 / 8 * 2 + i % 2))).x;
    ((float*)((char*)pk + 82432))[i] = v;
    return;
  }
  i -= 256u;
}
extern "C" __global__ void __launch_bounds__(128, 1) k(const void* __restrict__ in0, const void* __restrict__ pk,
    void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5, q = lane & 3, g = lane >> 2;
  const int side = role.block_x() & 1;
  const float* const x = (const float*)in0;
  float* const out = (float*)out0;
  const u64 weights = w_descriptor(w_shared(sm));
  const u32 box = w_shared(sm) + 67072u, mail = box + 16384u;
  const u32 full = mail + 16u, empty = full + 32u;
  if (t == 0) {
    for (int i = 0; i < 4; ++i) {
      w_bar_init(full + 8 * i, 1);
      w_bar_init(empty + 8 * i, 4);
    }
    w_bar_init(mail, 1);
    w_bar_init(mail + 8, 1);
    w_bar_ready();
    w_bar_expect(mail, 8192);
    w_bar_expect(mail + 8, 8192);
  }
  const u32 total = ((1u - 1 - (role.block_x() >> 1)) / (role.blocks_x() >> 1) + 1) * 3u;
  u32 asked = 0, at_asked = 0, slot_asked = 0, turn_asked = 0, slot = 0, parity = 0;
  auto ask = [&]() {
    if (asked < total) {
      const u32 size = at_asked <= 0u ? 8192u : (16384u);
      const u32 place = side ? at_asked <= 0u ? 8192u : (at_asked <= 1u ? 65536u : (32768u)) : at_asked <= 0u ? 0u
          : (at_asked <= 1u ? 16384u : (49152u));
      if (turn_asked) w_bar_wait(empty + 8 * slot_asked, (turn_asked - 1) & 1);
      w_bar_expect(full + 8 * slot_asked, size);
      w_bulk(w_shared(sm) + slot_asked * 16384u, (const char*)pk + place, size, full + 8 * slot_asked);
      ++asked;
      if (++at_asked == 3) at_asked = 0;
      if (++slot_asked == 4) {
        slot_asked = 0;
        ++turn_asked;
      }
    }
  };
  if (t == 0)
    for (int i = 0; i < 4; ++i) ask();
  for (int i = t; i < 96; i += 128) w_copy16(w_shared(sm) + 65536 + 16 * i, (const char*)pk + 81920 + 16 * i);
  w_commit();
  w_arrived<0>();
  role.sync();
  __syncwarp();
  w_cluster_sync();
  // PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
  role.pdl_wait();
  role.pdl_trigger();
  auto load = [&](int row, u32 (&to)[1][1][4]) {
    #pragma unroll
    for (int m = 0; m < 1; ++m)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + m * 64 + half * 8 + g;
        const float* const from = x + (u64)(r < 64 ? r : 63) * 3;
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
          float v[2];
          v[0] = 0.0f;
          if ((c * 8) + (2 * q) < 3) v[0] = from[(c * 8) + (2 * q)];
          v[1] = 0.0f;
          if ((c * 8) + (2 * q) + 1 < 3) v[1] = from[(c * 8) + (2 * q) + 1];
          {
            const int j = c;
            const w_f32 e1_0 = w_round_f16(v[0]);
            const w_f32 e1_1 = w_round_f16(v[1]);
            to[m][j / 2][j % 2 * 2 + half] = w_narrow2_f16((j * 8 + 7 < 3 || (j * 8) + (2 * q) < 3 ? e1_0 : 0.0f),
                (j * 8 + 7 < 3 || (j * 8) + (2 * q) + 1 < 3 ? e1_1 : 0.0f));
          }
        }
      }
  };
  u32 h1[1][1][4];
  u32 theirs[1][4][4], mails = 0;
  #pragma unroll 1
  for (int tile = role.block_x() >> 1; tile < 1; tile += role.blocks_x() >> 1) {
    const int row0 = tile * 64 + warp * 16;
    load(row0, h1);
    float d1[1][32];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 b = *(const float2*)(sm + 65536 + (j * 8 + 2 * q + side * 64) * 4);
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        d1[m][4 * j] = b.x;
        d1[m][4 * j + 1] = b.y;
        d1[m][4 * j + 2] = b.x;
        d1[m][4 * j + 3] = b.y;
      }
    }
    {
      w_bar_wait(full + 8 * slot, parity);
      {
        const u64 w = w_behind(weights, slot * 16384u);
        w_group_begin();
        #pragma unroll
        for (int k = 0; k < 1; ++k) w_wgmma_f16(d1[0], h1[0][k], w_behind(w, k % 4 * 32), 1);
        w_group_commit();
      }
      u32 before = slot;
      if (++slot == 4) {
        slot = 0;
        parity ^= 1;
      }
      w_group_wait<0>();
      __syncwarp();
      if (lane == 0) w_bar_arrive(empty + 8 * before);
      if (t == 0) ask();
      __syncwarp();
    }
    #pragma unroll
    for (int k = 0; k < 1; ++k)
      #pragma unroll
      for (int e = 0; e < 4; ++e) w_read_until(h1[0][k][e]);
    #pragma unroll
    for (int e = 0; e < 32; ++e) w_hold(d1[0][e]);
    u32 h14[1][4][4];
    #pragma unroll
    for (int m = 0; m < 1; ++m) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          const w_f32 e7_0 = d1[m][4 * j + (2 * half)];
          const w_f32 e7_1 = d1[m][4 * j + (2 * half + 1)];
          const w_f32 e8_0 = (-e7_0);
          const w_f32 e8_1 = (-e7_1);
          const w_f32 e9_0 = w_rough_exp(e8_0);
          const w_f32 e9_1 = w_rough_exp(e8_1);
          const w_f32 e12_0 = (e9_0 + 1.0f);
          const w_f32 e12_1 = (e9_1 + 1.0f);
          const w_f32 e13_0 = w_mlp_share(e7_0, e12_0);
          const w_f32 e13_1 = w_mlp_share(e7_1, e12_1);
          h14[m][j / 2][j % 2 * 2 + half] = w_narrow2_f16(e13_0, e13_1);
        }
      }
    }
    // to the other CTA of the cluster, by distributed shared memory; its barrier counts the bytes
    {
      const u32 to = box + (mails & 1) * 8192u + t * 16u, bar = mail + 8 * (mails & 1);
      #pragma unroll
      for (int k = 0; k < 4; ++k)
        w_mail_send(to + k * 2048u, make_uint4(h14[0][k][0], h14[0][k][1], h14[0][k][2], h14[0][k][3]), bar, side ^ 1);
    }
    float d2[1][64];
    #pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 b = *(const float2*)(sm + 66048 + (j * 8 + 2 * q + side * 128) * 4);
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        d2[m][4 * j] = b.x;
        d2[m][4 * j + 1] = b.y;
        d2[m][4 * j + 2] = b.x;
        d2[m][4 * j + 3] = b.y;
      }
    }
    {
      w_bar_wait(full + 8 * slot, parity);
      {
        const u64 w = w_behind(weights, slot * 16384u);
        w_group_begin();
        #pragma unroll
        for (int k = 0; k < 4; ++k) w_wgmma_f16(d2[0], h14[0][k], w_behind(w, k % 4 * 32), 1);
        w_group_commit();
      }
      u32 before = slot;
      if (++slot == 4) {
        slot = 0;
        parity ^= 1;
      }
      {
        const u32 at = mails & 1;
        w_mail_wait(mail + 8 * at, (mails >> 1) & 1);
        if (t == 0) w_bar_expect(mail + 8 * at, 8192u);
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint4 v = *(const uint4*)(sm + 67072 + at * 8192 + k * 2048 + t * 16);
          theirs[0][k][0] = v.x, theirs[0][k][1] = v.y, theirs[0][k][2] = v.z, theirs[0][k][3] = v.w;
        }
        ++mails;
      }
      w_bar_wait(full + 8 * slot, parity);
      {
        const u64 w = w_behind(weights, slot * 16384u);
        w_group_begin();
        #pragma unroll
        for (int k = 4; k < 8; ++k) w_wgmma_f16(d2[0], theirs[0][k - 4], w_behind(w, k % 4 * 32), 1);
        w_group_commit();
      }
      w_group_wait<1>();
      __syncwarp();
      if (lane == 0) w_bar_arrive(empty + 8 * before);
      if (t == 0) ask();
      __syncwarp();
      before = slot;
      if (++slot == 4) {
        slot = 0;
        parity ^= 1;
      }
      w_group_wait<0>();
      __syncwarp();
      if (lane == 0) w_bar_arrive(empty + 8 * before);
      if (t == 0) ask();
      __syncwarp();
    }
    #pragma unroll
    for (int k = 0; k < 4; ++k)
      #pragma unroll
      for (int e = 0; e < 4; ++e) w_read_until(h14[0][k][e]);
    #pragma unroll
    for (int k = 0; k < 4; ++k)
      #pragma unroll
      for (int e = 0; e < 4; ++e) w_read_until(theirs[0][k][e]);
    #pragma unroll
    for (int e = 0; e < 64; ++e) w_hold(d2[0][e]);
    #pragma unroll
    for (int m = 0; m < 1; ++m) {
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        float y[2][8];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = c * 4 + i;
          #pragma unroll
          for (int half = 0; half < 2; ++half) {
            const w_f32 e20_0 = d2[m][4 * j + (2 * half)];
            const w_f32 e20_1 = d2[m][4 * j + (2 * half + 1)];
            const w_f32 e21_0 = (-e20_0);
            const w_f32 e21_1 = (-e20_1);
            const w_f32 e22_0 = w_exp(e21_0);
            const w_f32 e22_1 = w_exp(e21_1);
            const w_f32 e24_0 = (e22_0 + 1.0f);
            const w_f32 e24_1 = (e22_1 + 1.0f);
            const w_f32 e25_0 = (e20_0 / e24_0);
            const w_f32 e25_1 = (e20_1 / e24_1);
            const w_f32 e26_0 = w_round_f16(e25_0);
            const w_f32 e26_1 = w_round_f16(e25_1);
            const w_f32 e27_0 = e26_0;
            const w_f32 e27_1 = e26_1;
            y[half][2 * i] = e27_0;
            y[half][2 * i + 1] = e27_1;
          }
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row0 + m * 64 + half * 8 + g;
          if (r < 64) {
            float* const to = out + (u64)r * 256 + side * 128 + c * 32;
            {
              *(float4*)(to + q * 8) = make_float4(y[half][0], y[half][1], y[half][2], y[half][3]);
              *(float4*)((to + q * 8) + 4) = make_float4(y[half][4], y[half][5], y[half][6], y[half][7]);
            }
          }
        }
      }
    }
  }
}
