// cuda(template=depthwise,th=1,threads=64,tw=1,width=4)
extern "C" __global__ void __launch_bounds__(64) ENTRY(const void* __restrict__ in0, const void* __restrict__ in2, const void* __restrict__ pk, void* __restrict__ out0) {
static constexpr w_solo role{};
const int i = role.block_x() * 64 + role.thread();
const int cv = i % 8, tx = i / 8 % 14, ty = i / 112 % 14, img = i / 1568;
const int n = cv * 4, g = 0, b = 0; (void)g; (void)b;
const u16* const w = (const u16*)pk + n * 9;
uint2 k0; w_read_if(k0, w, i < 1568);
uint2 k1; w_read_if(k1, w + 4, i < 1568);
uint2 k2; w_read_if(k2, w + 8, i < 1568);
uint2 k3; w_read_if(k3, w + 12, i < 1568);
uint2 k4; w_read_if(k4, w + 16, i < 1568);
uint2 k5; w_read_if(k5, w + 20, i < 1568);
uint2 k6; w_read_if(k6, w + 24, i < 1568);
uint2 k7; w_read_if(k7, w + 28, i < 1568);
uint2 k8; w_read_if(k8, w + 32, i < 1568);
role.pdl_wait(); role.pdl_trigger();
const bool live = i < 1568;
const int y0 = ty - 1, x0 = tx - 1;
const u16* const A = (const u16*)in0 + img * 6272 + y0 * 448 + x0 * 32 + n;
float acc[1][4];
#pragma unroll
for (int q = 0; q < 1; ++q)
#pragma unroll
for (int e = 0; e < 4; ++e) acc[q][e] = 0.0f;
const bool in_x0 = (u32)x0 < 14u;
const bool in_x1 = (u32)(x0 + 1) < 14u;
const bool in_x2 = (u32)(x0 + 2) < 14u;
{
const bool in_y0 = (u32)y0 < 14u;
uint2 h0_0; w_read_if(h0_0, A, live && in_y0 && in_x0);
uint2 h0_1; w_read_if(h0_1, A + 32, live && in_y0 && in_x1);
uint2 h0_2; w_read_if(h0_2, A + 64, live && in_y0 && in_x2);
const bool in_y1 = (u32)(y0 + 1) < 14u;
uint2 h1_0; w_read_if(h1_0, A + 448, live && in_y1 && in_x0);
uint2 h1_1; w_read_if(h1_1, A + 480, live && in_y1 && in_x1);
uint2 h1_2; w_read_if(h1_2, A + 512, live && in_y1 && in_x2);
const bool in_y2 = (u32)(y0 + 2) < 14u;
uint2 h2_0; w_read_if(h2_0, A + 896, live && in_y2 && in_x0);
uint2 h2_1; w_read_if(h2_1, A + 928, live && in_y2 && in_x1);
uint2 h2_2; w_read_if(h2_2, A + 960, live && in_y2 && in_x2);
w_together();
{ float v[4];
{ const float2 h = w_unpack_f16(h0_0.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h0_0.y); v[2] = h.x; v[3] = h.y; }
{ float f[4];
{ const float2 h = w_unpack_f16(k0.x); f[0] = h.x; f[1] = h.y; }
{ const float2 h = w_unpack_f16(k0.y); f[2] = h.x; f[3] = h.y; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
}
}
{ float v[4];
{ const float2 h = w_unpack_f16(h0_1.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h0_1.y); v[2] = h.x; v[3] = h.y; }
{ float f[4];
{ const float2 h = w_unpack_f16(k1.x); f[0] = h.x; f[1] = h.y; }
{ const float2 h = w_unpack_f16(k1.y); f[2] = h.x; f[3] = h.y; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
}
}
{ float v[4];
{ const float2 h = w_unpack_f16(h0_2.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h0_2.y); v[2] = h.x; v[3] = h.y; }
{ float f[4];
{ const float2 h = w_unpack_f16(k2.x); f[0] = h.x; f[1] = h.y; }
{ const float2 h = w_unpack_f16(k2.y); f[2] = h.x; f[3] = h.y; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
}
}
{ float v[4];
{ const float2 h = w_unpack_f16(h1_0.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h1_0.y); v[2] = h.x; v[3] = h.y; }
{ float f[4];
{ const float2 h = w_unpack_f16(k3.x); f[0] = h.x; f[1] = h.y; }
{ const float2 h = w_unpack_f16(k3.y); f[2] = h.x; f[3] = h.y; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
}
}
{ float v[4];
{ const float2 h = w_unpack_f16(h1_1.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h1_1.y); v[2] = h.x; v[3] = h.y; }
{ float f[4];
{ const float2 h = w_unpack_f16(k4.x); f[0] = h.x; f[1] = h.y; }
{ const float2 h = w_unpack_f16(k4.y); f[2] = h.x; f[3] = h.y; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
}
}
{ float v[4];
{ const float2 h = w_unpack_f16(h1_2.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h1_2.y); v[2] = h.x; v[3] = h.y; }
{ float f[4];
{ const float2 h = w_unpack_f16(k5.x); f[0] = h.x; f[1] = h.y; }
{ const float2 h = w_unpack_f16(k5.y); f[2] = h.x; f[3] = h.y; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
}
}
{ float v[4];
{ const float2 h = w_unpack_f16(h2_0.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h2_0.y); v[2] = h.x; v[3] = h.y; }
{ float f[4];
{ const float2 h = w_unpack_f16(k6.x); f[0] = h.x; f[1] = h.y; }
{ const float2 h = w_unpack_f16(k6.y); f[2] = h.x; f[3] = h.y; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
}
}
{ float v[4];
{ const float2 h = w_unpack_f16(h2_1.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h2_1.y); v[2] = h.x; v[3] = h.y; }
{ float f[4];
{ const float2 h = w_unpack_f16(k7.x); f[0] = h.x; f[1] = h.y; }
{ const float2 h = w_unpack_f16(k7.y); f[2] = h.x; f[3] = h.y; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
}
}
{ float v[4];
{ const float2 h = w_unpack_f16(h2_2.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h2_2.y); v[2] = h.x; v[3] = h.y; }
{ float f[4];
{ const float2 h = w_unpack_f16(k8.x); f[0] = h.x; f[1] = h.y; }
{ const float2 h = w_unpack_f16(k8.y); f[2] = h.x; f[3] = h.y; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], f[e], acc[0][e]);
}
}
}
auto finish = [&](const float (&acc)[4], int m) {
const u16* const x1p = (const u16*)in2 + n;
w_f32 x1[4];
const uint2 x1w = *(const uint2*)(x1p);
{ const float2 h = w_unpack_f16(x1w.x); x1[0] = h.x; x1[1] = h.y; }
{ const float2 h = w_unpack_f16(x1w.y); x1[2] = h.x; x1[3] = h.y; }
const w_f32 e2_0 = (acc[0] + x1[0]);
const w_f32 e2_1 = (acc[1] + x1[1]);
const w_f32 e2_2 = (acc[2] + x1[2]);
const w_f32 e2_3 = (acc[3] + x1[3]);
const w_f32 e3_0 = w_max_const(e2_0, 0.0f);
const w_f32 e3_1 = w_max_const(e2_1, 0.0f);
const w_f32 e3_2 = w_max_const(e2_2, 0.0f);
const w_f32 e3_3 = w_max_const(e2_3, 0.0f);
u16* const y0 = (u16*)out0 + (m * 32 + n);
*(uint2*)(y0) = make_uint2(w_narrow2_f16(e3_0, e3_1), w_narrow2_f16(e3_2, e3_3));
};
if (!live) return;
finish(acc[0], (img * 14 + ty) * 14 + tx);
}
extern "C" __global__ void ENTRY_pack(const void* __restrict__ w, void* __restrict__ pk) {
static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 288u) return;
  const int tap = i / 4 % 9, n = i / 36 * 4 + i % 4;
  ((u16*)pk)[i] = ((const u16*)w)[n * 9 + tap / 3 * 3 + tap % 3];
}
