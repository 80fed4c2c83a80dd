// cuda(template=depthwise,th=1,threads=64,tw=1,width=4)
extern "C" __global__ void __launch_bounds__(64) ENTRY(const void* __restrict__ in0, const void* __restrict__ in2, const void* __restrict__ pk, void* __restrict__ out0) {
const int i = blockIdx.x * 64 + threadIdx.x;
const int cv = i % 8, tx = i / 8 % 14, ty = i / 112 % 14, img = i / 1568;
const int n = cv * 4, g = 0, b = 0; (void)g; (void)b;
const u16* const w = (const u16*)pk + n * 9;
float k[9][4];
if (i < 1568) {
{
const uint2 h_ = *(const uint2*)(w + 0);
{ const float2 h = w_unpack_f16(h_.x); k[0][0] = h.x; k[0][1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); k[0][2] = h.x; k[0][3] = h.y; }
}
{
const uint2 h_ = *(const uint2*)(w + 4);
{ const float2 h = w_unpack_f16(h_.x); k[1][0] = h.x; k[1][1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); k[1][2] = h.x; k[1][3] = h.y; }
}
{
const uint2 h_ = *(const uint2*)(w + 8);
{ const float2 h = w_unpack_f16(h_.x); k[2][0] = h.x; k[2][1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); k[2][2] = h.x; k[2][3] = h.y; }
}
{
const uint2 h_ = *(const uint2*)(w + 12);
{ const float2 h = w_unpack_f16(h_.x); k[3][0] = h.x; k[3][1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); k[3][2] = h.x; k[3][3] = h.y; }
}
{
const uint2 h_ = *(const uint2*)(w + 16);
{ const float2 h = w_unpack_f16(h_.x); k[4][0] = h.x; k[4][1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); k[4][2] = h.x; k[4][3] = h.y; }
}
{
const uint2 h_ = *(const uint2*)(w + 20);
{ const float2 h = w_unpack_f16(h_.x); k[5][0] = h.x; k[5][1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); k[5][2] = h.x; k[5][3] = h.y; }
}
{
const uint2 h_ = *(const uint2*)(w + 24);
{ const float2 h = w_unpack_f16(h_.x); k[6][0] = h.x; k[6][1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); k[6][2] = h.x; k[6][3] = h.y; }
}
{
const uint2 h_ = *(const uint2*)(w + 28);
{ const float2 h = w_unpack_f16(h_.x); k[7][0] = h.x; k[7][1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); k[7][2] = h.x; k[7][3] = h.y; }
}
{
const uint2 h_ = *(const uint2*)(w + 32);
{ const float2 h = w_unpack_f16(h_.x); k[8][0] = h.x; k[8][1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); k[8][2] = h.x; k[8][3] = h.y; }
}
}
w_wait(); w_release();
if (i >= 1568) return;
const int y0 = ty * 1 - 1, x0 = tx * 1 - 1;
const u16* const A = (const u16*)in0 + 0 + img * 6272 + y0 * 448 + x0 * 32 + n * 1;
float acc[1][4];
#pragma unroll
for (int q = 0; q < 1; ++q)
#pragma unroll
for (int e = 0; e < 4; ++e) acc[q][e] = 0.0f;
if ((u32)(y0 + 0) < 14u) {
{ float v[4];
if ((u32)(x0 + 0) < 14u) {
{
const uint2 h_ = *(const uint2*)(A + 0);
{ const float2 h = w_unpack_f16(h_.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); v[2] = h.x; v[3] = h.y; }
}
} else { v[0] = 0.0f; v[1] = 0.0f; v[2] = 0.0f; v[3] = 0.0f; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], k[0][e], acc[0][e]);
}
{ float v[4];
if ((u32)(x0 + 1) < 14u) {
{
const uint2 h_ = *(const uint2*)(A + 32);
{ const float2 h = w_unpack_f16(h_.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); v[2] = h.x; v[3] = h.y; }
}
} else { v[0] = 0.0f; v[1] = 0.0f; v[2] = 0.0f; v[3] = 0.0f; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], k[1][e], acc[0][e]);
}
{ float v[4];
if ((u32)(x0 + 2) < 14u) {
{
const uint2 h_ = *(const uint2*)(A + 64);
{ const float2 h = w_unpack_f16(h_.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); v[2] = h.x; v[3] = h.y; }
}
} else { v[0] = 0.0f; v[1] = 0.0f; v[2] = 0.0f; v[3] = 0.0f; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], k[2][e], acc[0][e]);
}
}
if ((u32)(y0 + 1) < 14u) {
{ float v[4];
if ((u32)(x0 + 0) < 14u) {
{
const uint2 h_ = *(const uint2*)(A + 448);
{ const float2 h = w_unpack_f16(h_.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); v[2] = h.x; v[3] = h.y; }
}
} else { v[0] = 0.0f; v[1] = 0.0f; v[2] = 0.0f; v[3] = 0.0f; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], k[3][e], acc[0][e]);
}
{ float v[4];
if ((u32)(x0 + 1) < 14u) {
{
const uint2 h_ = *(const uint2*)(A + 480);
{ const float2 h = w_unpack_f16(h_.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); v[2] = h.x; v[3] = h.y; }
}
} else { v[0] = 0.0f; v[1] = 0.0f; v[2] = 0.0f; v[3] = 0.0f; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], k[4][e], acc[0][e]);
}
{ float v[4];
if ((u32)(x0 + 2) < 14u) {
{
const uint2 h_ = *(const uint2*)(A + 512);
{ const float2 h = w_unpack_f16(h_.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); v[2] = h.x; v[3] = h.y; }
}
} else { v[0] = 0.0f; v[1] = 0.0f; v[2] = 0.0f; v[3] = 0.0f; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], k[5][e], acc[0][e]);
}
}
if ((u32)(y0 + 2) < 14u) {
{ float v[4];
if ((u32)(x0 + 0) < 14u) {
{
const uint2 h_ = *(const uint2*)(A + 896);
{ const float2 h = w_unpack_f16(h_.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); v[2] = h.x; v[3] = h.y; }
}
} else { v[0] = 0.0f; v[1] = 0.0f; v[2] = 0.0f; v[3] = 0.0f; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], k[6][e], acc[0][e]);
}
{ float v[4];
if ((u32)(x0 + 1) < 14u) {
{
const uint2 h_ = *(const uint2*)(A + 928);
{ const float2 h = w_unpack_f16(h_.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); v[2] = h.x; v[3] = h.y; }
}
} else { v[0] = 0.0f; v[1] = 0.0f; v[2] = 0.0f; v[3] = 0.0f; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], k[7][e], acc[0][e]);
}
{ float v[4];
if ((u32)(x0 + 2) < 14u) {
{
const uint2 h_ = *(const uint2*)(A + 960);
{ const float2 h = w_unpack_f16(h_.x); v[0] = h.x; v[1] = h.y; }
{ const float2 h = w_unpack_f16(h_.y); v[2] = h.x; v[3] = h.y; }
}
} else { v[0] = 0.0f; v[1] = 0.0f; v[2] = 0.0f; v[3] = 0.0f; }
#pragma unroll
for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(v[e], k[8][e], acc[0][e]);
}
}
auto finish = [&](const float (&acc)[4], int m) {
const u16* const x1p = (const u16*)in2 + (0 + n);
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
u16* const y0 = (u16*)out0 + ((m) * 32 + n);
*(uint2*)(y0) = make_uint2(w_narrow2_f16(e3_0, e3_1), w_narrow2_f16(e3_2, e3_3));
};
finish(acc[0], (img * 14 + ty * 1 + 0) * 14 + tx * 1 + 0);
}

extern "C" __global__ void ENTRY_pack(const void* __restrict__ w, void* __restrict__ pk) {
  const u32 i = blockIdx.x * 256u + threadIdx.x;
  if (i >= 288u) return;
  const int tap = i / 4 % 9, n = i / 36 * 4 + i % 4;
  ((u16*)pk)[i] = ((const u16*)w)[0 + n * 9
      + tap / 3 * 3 + tap % 3 * 1];
}
