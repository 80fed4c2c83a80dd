// Warpgroup products of 8-bit numbers on the host, after host_tma.h and weft_cuda_float8.h.
// Sums are f32 of floats, i32 of integers.
inline unsigned char w_byte(u64 d, int row, int k) {  // element `k` (0 to 31) of row `row` of an operand
  const u32 start = (u32)(d & 0x3fff) << 4, stride = (u32)(d >> 32 & 0x3fff) << 4, mode = (u32)(d >> 62);
  if (mode == 0) w_fail("an operand without swizzle");
  const u32 line = mode == 1 ? 128 : mode == 2 ? 64 : 32, mask = line / 16 - 1;
  u32 at = start + row / 8 * stride + row % 8 * line + k;
  at ^= ((at >> 7) & mask) << 4;
  if (at >= w_self->block->shared_bytes) w_fail("warpgroup product beyond shared memory");
  return w_self->block->shared[at];
}
template <class A, class B> inline void w_by_descriptor_float8(const Product& p) {
  const int lane = w_self->lane, warp = w_self->index.x / 32 % 4;
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + lane / 4 + h * 8;
    float x[32];
    for (int k = 0; k < 32; ++k) x[k] = w_widen(A{w_byte(p.a, row, k)});
    for (int j = 2 * h; j < p.half; j += 4)
      for (int e = 0; e < 2; ++e) {
        const int col = j / 4 * 8 + lane % 4 * 2 + e;
        float sum = p.add ? p.d[j + e] : 0.0f;
        for (int k = 0; k < 32; ++k) sum += x[k] * w_widen(B{w_byte(p.b, col, k)});
        p.d[j + e] = sum;
      }
  }
}
#define W_PRODUCT_FLOAT8(A, B) \
  template <int H> inline void w_product_##A##B##_00(float (&d)[H], u64 a, u64 b, int add) { \
    const Product p{d, H, a, b, add, nullptr, w_by_descriptor_float8<w_f8##A, w_f8##B>}; \
    if (w_defer) w_self->issued.push_back(p); else w_do(p); \
  }
W_PRODUCT_FLOAT8(e4m3, e4m3) W_PRODUCT_FLOAT8(e4m3, e5m2) W_PRODUCT_FLOAT8(e5m2, e4m3) W_PRODUCT_FLOAT8(e5m2, e5m2)
template <class A, class B> inline void w_by_descriptor_bytes(const Product& p) {
  const int lane = w_self->lane, warp = w_self->index.x / 32 % 4;
  u32* const d = (u32*)p.d;  // sums wrap around
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + lane / 4 + h * 8;
    int x[32];
    for (int k = 0; k < 32; ++k) x[k] = (A)w_byte(p.a, row, k);
    for (int j = 2 * h; j < p.half; j += 4)
      for (int e = 0; e < 2; ++e) {
        const int col = j / 4 * 8 + lane % 4 * 2 + e;
        u32 sum = p.add ? d[j + e] : 0;
        for (int k = 0; k < 32; ++k) sum += (u32)(x[k] * (int)(B)w_byte(p.b, col, k));
        d[j + e] = sum;
      }
  }
}
typedef signed char w_s8;
typedef unsigned char w_u8;
#define W_PRODUCT_BYTES(A, B) \
  inline int w_dot_word_##A##B(u32 a, u32 b, int c) { \
    for (int i = 0; i < 32; i += 8) c = (int)((u32)c + (u32)((int)(w_##A)(a >> i) * (int)(w_##B)(b >> i))); \
    return c; \
  } \
  template <int H> inline void w_product_##A##B##_00(int (&d)[H], u64 a, u64 b, int add) { \
    const Product p{(float*)d, H, a, b, add, nullptr, w_by_descriptor_bytes<w_##A, w_##B>}; \
    if (w_defer) w_self->issued.push_back(p); else w_do(p); \
  }
W_PRODUCT_BYTES(s8, s8) W_PRODUCT_BYTES(s8, u8) W_PRODUCT_BYTES(u8, s8) W_PRODUCT_BYTES(u8, u8)
