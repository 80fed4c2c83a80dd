// 8-bit floats in memory, f32 in registers. Stands behind weft_cuda.h in kernels that read or write them.
struct w_f8e4m3 { unsigned char bits; };
struct w_f8e5m2 { unsigned char bits; };
template <> struct w_reg<w_f8e4m3> { typedef w_f32 type; };
template <> struct w_reg<w_f8e5m2> { typedef w_f32 type; };
#ifndef W_EMULATED
// what is read of x behind this is not read before it
W_FN void w_held(float& x) { asm volatile("" : "+f"(x) :: "memory"); }
W_FN unsigned w_times256_f16(unsigned x) {  // both halves of a word
  unsigned r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(0x5c005c00u));
  return r;
}
#endif
// two neighbours, the low 16 bits of x, as halves: exact
W_FN unsigned w_halves_f8e4m3(unsigned x) {
#if __CUDA_ARCH__ >= 890
  unsigned r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((unsigned short)x));
  return r;
#else
  const unsigned wide = (x & 0xffu) | (x & 0xff00u) << 8, nan = (wide & 0x7f007fu) + 0x10001u & 0x800080u;
  const unsigned bits = (wide & 0x800080u) << 8 | (wide & 0x7f007fu) << 7;  // as a half it is 2^-8 times the number
  return w_times256_f16(bits | nan * 0xf8u);
#endif
}
W_FN unsigned w_halves_f8e5m2(unsigned x) { return (x & 0xffu) << 8 | (x & 0xff00u) << 16; }
W_FN w_f32 w_widen(w_f8e4m3 x) { return w_widen_f16((unsigned short)w_halves_f8e4m3(x.bits)); }
W_FN w_f32 w_widen(w_f8e5m2 x) { return w_widen_f16((unsigned short)(x.bits << 8)); }
W_FN unsigned w_narrow_f8e4m3(w_f32 x) {  // to nearest even; beyond 448: 448
#if __CUDA_ARCH__ >= 890
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(x));
  return r;
#else
  const unsigned sign = w_bits<unsigned>(x) >> 24 & 0x80u, m = w_bits<unsigned>(x) & 0x7fffffffu;
  if (m > 0x7f800000u) return sign | 0x7fu;
  if (m >= 0x43e00000u) return sign | 0x7eu;
  if (m < 0x3c800000u) return sign | (w_bits<unsigned>(w_bits<w_f32>(m) + 16384.0f) - 0x46800000u);
  return sign | ((m + 0x7ffffu + (m >> 20 & 1u) >> 20) - 960u);
#endif
}
W_FN unsigned w_narrow_f8e5m2(w_f32 x) {  // to nearest even; beyond 57344: infinity
  const unsigned sign = w_bits<unsigned>(x) >> 24 & 0x80u, m = w_bits<unsigned>(x) & 0x7fffffffu;
  if (m > 0x7f800000u) return sign | 0x7fu;
  if (m >= 0x47700000u) return sign | 0x7cu;
#if __CUDA_ARCH__ >= 890
  unsigned short r;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(x));
  return r;
#else
  if (m < 0x38800000u) return sign | (w_bits<unsigned>(w_bits<w_f32>(m) + 128.0f) - 0x43000000u);
  return sign | ((m + 0xfffffu + (m >> 21 & 1u) >> 21) - 448u);
#endif
}
template <> __device__ __forceinline__ w_f8e4m3 w_narrow<w_f8e4m3>(w_f32 x) {
  return w_f8e4m3{(unsigned char)w_narrow_f8e4m3(x)};
}
template <> __device__ __forceinline__ w_f8e5m2 w_narrow<w_f8e5m2>(w_f32 x) {
  return w_f8e5m2{(unsigned char)w_narrow_f8e5m2(x)};
}
W_FN w_f32 w_round_f8e4m3(w_f32 x) { return w_widen(w_narrow<w_f8e4m3>(x)); }
W_FN w_f32 w_round_f8e5m2(w_f32 x) { return w_widen(w_narrow<w_f8e5m2>(x)); }
W_FN w_f32 w_part(unsigned word, int at, const w_f8e4m3*) { return w_widen(w_f8e4m3{(unsigned char)(word >> 8 * at)}); }
W_FN w_f32 w_part(unsigned word, int at, const w_f8e5m2*) { return w_widen(w_f8e5m2{(unsigned char)(word >> 8 * at)}); }
template <> __device__ __forceinline__ unsigned w_raw<w_f8e4m3>(w_f32 x) { return w_narrow_f8e4m3(x); }
template <> __device__ __forceinline__ unsigned w_raw<w_f8e5m2>(w_f32 x) { return w_narrow_f8e5m2(x); }
