// cuda(columns=32,group=False,persistent_ctas=1,stages=3,template=mlp_wide,warps=2)
extern "C" __global__ void ENTRY_pack(const void* __restrict__ in1, const void* __restrict__ in2, const void* __restrict__ in3, const void* __restrict__ in4, const void* __restrict__ in5, const void* __restrict__ in6, void* __restrict__ pk) {
static constexpr w_solo role{};
u32 i = role.block_x() * 256u + role.thread();
// fragments as mma.sync holds them, two neighbouring tiles of 8 columns side by side
if (i < 18432u) { const u32 pn = i / 2048 * 32 + i % 2048 / 256 % 2 * 16 + i % 8 / 4 * 8 + i % 256 / 32, pk_ = i % 2048 / 512 * 16 + i % 4 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
const u32 n = pn;
const u32 k = pk_;
u16 v = 0; if (n < 288 && k < 40) v = ((const u16*)in1)[k * 288 + n];
((u16*)((char*)pk))[i] = v; return; }
i -= 18432u;
// fragments as mma.sync holds them, two neighbouring tiles of 8 columns side by side
if (i < 92160u) { const u32 pn = i / 10240 * 32 + i % 10240 / 256 % 2 * 16 + i % 8 / 4 * 8 + i % 256 / 32, pk_ = i % 10240 / 512 * 16 + i % 4 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
const u32 n = pn;
const u32 k = (pk_ < 288u ? pk_ : 288u);
u16 v = 0; if (n < 288 && k < 288) v = ((const u16*)in3)[k * 288 + n];
((u16*)((char*)pk + 36864))[i] = v; return; }
i -= 92160u;
// fragments as mma.sync holds them, two neighbouring tiles of 8 columns side by side
if (i < 5120u) { const u32 pn = i % 8 / 4 * 8 + i % 256 / 32, pk_ = i / 256 * 16 + i % 4 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
const u32 n = pn;
const u32 k = (pk_ < 288u ? pk_ : 288u);
u16 v = 0; if (n < 5 && k < 288) v = ((const u16*)in5)[k * 5 + n];
((u16*)((char*)pk + 221184))[i] = v; return; }
i -= 5120u;
if (i < 288u) { float v = 0.0f; if (i < 288) v = (float)w_unpack_bf16(*((const u16*)in2 + i)).x; ((float*)((char*)pk + 231424))[i] = v; return; }
i -= 288u;
if (i < 288u) { float v = 0.0f; if (i < 288) v = (float)w_unpack_bf16(*((const u16*)in4 + i)).x; ((float*)((char*)pk + 232576))[i] = v; return; }
i -= 288u;
if (i < 16u) { float v = 0.0f; if (i < 5) v = (float)w_unpack_bf16(*((const u16*)in6 + i)).x; ((float*)((char*)pk + 233728))[i] = v; return; }
i -= 16u;
}
extern "C" __global__ void __launch_bounds__(64, 1) ENTRY(const void* __restrict__ in0, const void* __restrict__ pk, void* __restrict__ out0) {
static constexpr w_solo role{};
W_DYNAMIC(sm);
const int t = role.thread(), lane = t & 31, warp = t >> 5, q = lane & 3, g = lane >> 2;
const int owner = warp;
const u16* const x = (const u16*)in0;
u16* const out = (u16*)out0;
(void)q; (void)g; (void)lane;
// panels of weights come through a ring, in the order in which they are read
for (int i = t; i < 148; i += 64)
w_copy16(w_shared(sm) + 30720 + 16 * i, (const char*)pk + 231424 + 16 * i);
const u32 total = ((10u - 1 - role.block_x()) / role.blocks_x() + 1) * 59u;
u32 asked = 0, place = 0, at_asked = 0, slot_asked = 0, turn_asked = 0, slot = 0, parity = 0;
(void)turn_asked; (void)parity;
w_commit();
auto ask = [&]() {
if (asked < total) {
const u32 size = at_asked <= 53u ? 4096u : (2048u);
for (u32 i = 16 * t; i < size; i += 1024)
w_copy16(w_shared(sm) + 18432 + (slot_asked * 4096u) + i, (const char*)pk + place + i);
++asked; place += size; if (++at_asked == 59) { at_asked = 0; place = 0; }
if (++slot_asked == 3) { slot_asked = 0; ++turn_asked; }
}
w_commit();
};
for (int i = 0; i < 2; ++i) ask();
w_arrived<2>(); role.sync();
// PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
role.pdl_wait(); role.pdl_trigger();
auto load = [&](int row, u32 (&to)[1][3][4]) {
#pragma unroll
for (int m = 0; m < 1; ++m)
#pragma unroll
for (int half = 0; half < 2; ++half) {
const int r = row + m * 16 + half * 8 + g;
const u16* const from = x + (u64)(r < 300 ? r : 299) * 40;
#pragma unroll
for (int c = 0; c < 6; ++c) {
u32 w = 0; if (c * 8 + 2 * q < 40) w = *(const u32*)(from + c * 8 + q * 2);
to[m][c / 2][c % 2 * 2 + half] = w;
}
}
};
#pragma unroll 1
for (int turn = role.block_x(); turn < 10; turn += role.blocks_x()) {
const int row0 = (turn * 2 + owner) * 16;
{  // layer 1, 32 columns at a time
u32 a[1][3][4];
load(row0, a);
#pragma unroll 1
for (int c = 0; c < 9; ++c) {
float d[4][4];
#pragma unroll
for (int i = 0; i < 4; ++i) { const int j = c * 4 + i; (void)j;
d[i][0] = 0.0f;
d[i][1] = 0.0f;
d[i][2] = 0.0f;
d[i][3] = 0.0f;
}
{
w_arrived<1>(); role.sync(); ask();
#pragma unroll
for (int k = 0; k < 3; ++k)
#pragma unroll
for (int i = 0; i < 2; ++i) {
const uint4 w = *(const uint4*)(sm + 18432 + (slot * 4096)
+ ((k * 2 + i) * 32 + lane) * 16);
w_mma_bf16(d[2 * i], a[0][k], w.x, w.y); w_mma_bf16(d[2 * i + 1], a[0][k], w.z, w.w);
}
if (++slot == 3) { slot = 0; parity ^= 1; }
}
#pragma unroll
for (int pair = 0; pair < 2; ++pair) { const int j0 = c * 4 + 2 * pair;
u32 o8[4];
#pragma unroll
for (int b = 0; b < 2; ++b) { const int i = 2 * pair + b, j = j0 + b;
const float2 b4 = *(const float2*)(sm + 30720 + (j * 8 + 2 * q) * 4); (void)b4;
#pragma unroll
for (int half = 0; half < 2; ++half) {
const w_f32 e5_0 = (d[i][2 * half] + b4.x);
const w_f32 e5_1 = (d[i][2 * half + 1] + b4.y);
o8[b * 2 + half] = w_relu2_bf16(e5_0, e5_1);
}
}
*(uint4*)(sm + ((j0 / 2) * 64 + t) * 16) = make_uint4(o8[0], o8[1], o8[2], o8[3]);
}
}
}
{  // layer 2, 32 columns at a time
u32 a[1][18][4];
#pragma unroll
for (int k = 0; k < 18; ++k) { const uint4 w = *(uint4*)(sm + (k * 64 + t) * 16); a[0][k][0] = w.x; a[0][k][1] = w.y; a[0][k][2] = w.z; a[0][k][3] = w.w; }
#pragma unroll 1
for (int c = 0; c < 9; ++c) {
float d[4][4];
#pragma unroll
for (int i = 0; i < 4; ++i) { const int j = c * 4 + i; (void)j;
d[i][0] = 0.0f;
d[i][1] = 0.0f;
d[i][2] = 0.0f;
d[i][3] = 0.0f;
}
{
w_arrived<1>(); role.sync(); ask();
#pragma unroll
for (int k = 0; k < 4; ++k)
#pragma unroll
for (int i = 0; i < 2; ++i) {
const uint4 w = *(const uint4*)(sm + 18432 + (slot * 4096)
+ ((k * 2 + i) * 32 + lane) * 16);
w_mma_bf16(d[2 * i], a[0][k], w.x, w.y); w_mma_bf16(d[2 * i + 1], a[0][k], w.z, w.w);
}
if (++slot == 3) { slot = 0; parity ^= 1; }
w_arrived<1>(); role.sync(); ask();
#pragma unroll
for (int k = 0; k < 4; ++k)
#pragma unroll
for (int i = 0; i < 2; ++i) {
const uint4 w = *(const uint4*)(sm + 18432 + (slot * 4096)
+ ((k * 2 + i) * 32 + lane) * 16);
w_mma_bf16(d[2 * i], a[0][4 + k], w.x, w.y); w_mma_bf16(d[2 * i + 1], a[0][4 + k], w.z, w.w);
}
if (++slot == 3) { slot = 0; parity ^= 1; }
w_arrived<1>(); role.sync(); ask();
#pragma unroll
for (int k = 0; k < 4; ++k)
#pragma unroll
for (int i = 0; i < 2; ++i) {
const uint4 w = *(const uint4*)(sm + 18432 + (slot * 4096)
+ ((k * 2 + i) * 32 + lane) * 16);
w_mma_bf16(d[2 * i], a[0][8 + k], w.x, w.y); w_mma_bf16(d[2 * i + 1], a[0][8 + k], w.z, w.w);
}
if (++slot == 3) { slot = 0; parity ^= 1; }
w_arrived<1>(); role.sync(); ask();
#pragma unroll
for (int k = 0; k < 4; ++k)
#pragma unroll
for (int i = 0; i < 2; ++i) {
const uint4 w = *(const uint4*)(sm + 18432 + (slot * 4096)
+ ((k * 2 + i) * 32 + lane) * 16);
w_mma_bf16(d[2 * i], a[0][12 + k], w.x, w.y); w_mma_bf16(d[2 * i + 1], a[0][12 + k], w.z, w.w);
}
if (++slot == 3) { slot = 0; parity ^= 1; }
w_arrived<1>(); role.sync(); ask();
#pragma unroll
for (int k = 0; k < 2; ++k)
#pragma unroll
for (int i = 0; i < 2; ++i) {
const uint4 w = *(const uint4*)(sm + 18432 + (slot * 4096)
+ ((k * 2 + i) * 32 + lane) * 16);
w_mma_bf16(d[2 * i], a[0][16 + k], w.x, w.y); w_mma_bf16(d[2 * i + 1], a[0][16 + k], w.z, w.w);
}
if (++slot == 3) { slot = 0; parity ^= 1; }
}
#pragma unroll
for (int pair = 0; pair < 2; ++pair) { const int j0 = c * 4 + 2 * pair;
const uint4 f8 = *(uint4*)(sm + ((j0 / 2) * 64 + t) * 16);
u32 o22[4];
#pragma unroll
for (int b = 0; b < 2; ++b) { const int i = 2 * pair + b, j = j0 + b;
const float2 b12 = *(const float2*)(sm + 31872 + (j * 8 + 2 * q) * 4); (void)b12;
#pragma unroll
for (int half = 0; half < 2; ++half) {
const float2 k8 = w_unpack_bf16(i % 2 ? (half ? f8.w : f8.z) : (half ? f8.y : f8.x));
const w_f32 e13_0 = (d[i][2 * half] + b12.x);
const w_f32 e13_1 = (d[i][2 * half + 1] + b12.y);
const w_f32 e14_0 = e13_0;
const w_f32 e14_1 = e13_1;
const w_f32 e15_0 = (-e14_0);
const w_f32 e15_1 = (-e14_1);
const w_f32 e20_0 = w_mlp_share_short(e14_0, e15_0);
const w_f32 e20_1 = w_mlp_share_short(e14_1, e15_1);
const w_f32 e21_0 = w_round_bf16(e20_0);
const w_f32 e21_1 = w_round_bf16(e20_1);
const w_f32 e22_0 = (e21_0 + k8.x);
const w_f32 e22_1 = (e21_1 + k8.y);
o22[b * 2 + half] = w_narrow2_bf16(e22_0, e22_1);
}
}
*(uint4*)(sm + ((j0 / 2) * 64 + t) * 16) = make_uint4(o22[0], o22[1], o22[2], o22[3]);
}
}
}
{  // layer 3, 16 columns at a time
u32 a[1][18][4];
#pragma unroll
for (int k = 0; k < 18; ++k) { const uint4 w = *(uint4*)(sm + (k * 64 + t) * 16); a[0][k][0] = w.x; a[0][k][1] = w.y; a[0][k][2] = w.z; a[0][k][3] = w.w; }
{ const int c = 0;
float d[2][4];
#pragma unroll
for (int i = 0; i < 2; ++i) { const int j = c * 2 + i; (void)j;
const float2 b = *(const float2*)(sm + 33024 + ((j * 8 + 2 * q) * 4));
d[i][0] = b.x;
d[i][1] = b.y;
d[i][2] = b.x;
d[i][3] = b.y;
}
{
w_arrived<1>(); role.sync(); ask();
#pragma unroll
for (int k = 0; k < 4; ++k)
#pragma unroll
for (int i = 0; i < 1; ++i) {
const uint4 w = *(const uint4*)(sm + 18432 + (slot * 4096)
+ ((k + i) * 32 + lane) * 16);
w_mma_bf16(d[2 * i], a[0][k], w.x, w.y); w_mma_bf16(d[2 * i + 1], a[0][k], w.z, w.w);
}
if (++slot == 3) { slot = 0; parity ^= 1; }
w_arrived<1>(); role.sync(); ask();
#pragma unroll
for (int k = 0; k < 4; ++k)
#pragma unroll
for (int i = 0; i < 1; ++i) {
const uint4 w = *(const uint4*)(sm + 18432 + (slot * 4096)
+ ((k + i) * 32 + lane) * 16);
w_mma_bf16(d[2 * i], a[0][4 + k], w.x, w.y); w_mma_bf16(d[2 * i + 1], a[0][4 + k], w.z, w.w);
}
if (++slot == 3) { slot = 0; parity ^= 1; }
w_arrived<1>(); role.sync(); ask();
#pragma unroll
for (int k = 0; k < 4; ++k)
#pragma unroll
for (int i = 0; i < 1; ++i) {
const uint4 w = *(const uint4*)(sm + 18432 + (slot * 4096)
+ ((k + i) * 32 + lane) * 16);
w_mma_bf16(d[2 * i], a[0][8 + k], w.x, w.y); w_mma_bf16(d[2 * i + 1], a[0][8 + k], w.z, w.w);
}
if (++slot == 3) { slot = 0; parity ^= 1; }
w_arrived<1>(); role.sync(); ask();
#pragma unroll
for (int k = 0; k < 4; ++k)
#pragma unroll
for (int i = 0; i < 1; ++i) {
const uint4 w = *(const uint4*)(sm + 18432 + (slot * 4096)
+ ((k + i) * 32 + lane) * 16);
w_mma_bf16(d[2 * i], a[0][12 + k], w.x, w.y); w_mma_bf16(d[2 * i + 1], a[0][12 + k], w.z, w.w);
}
if (++slot == 3) { slot = 0; parity ^= 1; }
w_arrived<1>(); role.sync(); ask();
#pragma unroll
for (int k = 0; k < 2; ++k)
#pragma unroll
for (int i = 0; i < 1; ++i) {
const uint4 w = *(const uint4*)(sm + 18432 + (slot * 4096)
+ ((k + i) * 32 + lane) * 16);
w_mma_bf16(d[2 * i], a[0][16 + k], w.x, w.y); w_mma_bf16(d[2 * i + 1], a[0][16 + k], w.z, w.w);
}
if (++slot == 3) { slot = 0; parity ^= 1; }
}
#pragma unroll
for (int cc = 0; cc < 2; ++cc) { float y[2][2];
const int column = c * 16 + cc * 8;
#pragma unroll
for (int b = 0; b < 1; ++b) { const int i = cc + b, j = c * 2 + i;
const int j0 = j & ~1; (void)j0;
#pragma unroll
for (int half = 0; half < 2; ++half) {
y[half][2 * b] = d[i][2 * half];
y[half][2 * b + 1] = d[i][2 * half + 1];
}
}
#pragma unroll
for (int half = 0; half < 2; ++half) { const int r = row0 + half * 8 + g;
if (r < 300 && column < 5) { u16* const to = out + (u64)r * 5 + column;
if (column + (2 * q) < 5) {
*(to + (2 * q)) = (u16)w_narrow2_bf16(y[half][0], 0.0f);
}
if (column + (2 * q) + 1 < 5) {
*(to + (2 * q) + 1) = (u16)w_narrow2_bf16(y[half][1], 0.0f);
}
}
}
}
}
}
}
}
