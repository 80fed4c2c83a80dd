// Runtime of Weft's generated CUDA kernels: register types, loads and stores, IEEE arithmetic and elementary functions
// of one element, with the meaning of weft.ir.prims. Stands behind weft_cuda_machine.h; includes nothing.
typedef float w_f32;
typedef double w_f64;
typedef long long w_i64;
typedef int w_i32;
typedef short w_i16;
typedef signed char w_i8;
typedef unsigned char w_u8;
typedef bool w_bool;
struct w_f16 { unsigned short bits; };
struct w_bf16 { unsigned short bits; };
#ifdef W_WIDE  // some address does not fit in 31 bits
typedef unsigned long long w_index;
typedef long long w_signed;
#else
typedef unsigned w_index;
typedef int w_signed;
#endif
template <class To, class From> W_FN To w_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "sizes");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

// one element between memory and a register
template <class T> struct w_reg { typedef T type; };
template <> struct w_reg<w_f16> { typedef w_f32 type; };
template <> struct w_reg<w_bf16> { typedef w_f32 type; };
W_FN w_f32 w_widen(w_f16 x) { return w_widen_f16(x.bits); }
W_FN w_f32 w_widen(w_bf16 x) { return w_bits<w_f32>((unsigned)x.bits << 16); }
W_FN bool w_widen(bool x) { return x; }
W_FN w_f32 w_widen(w_f32 x) { return x; }
W_FN w_f64 w_widen(w_f64 x) { return x; }
W_FN w_i64 w_widen(w_i64 x) { return x; }
W_FN w_i32 w_widen(w_i32 x) { return x; }
W_FN w_i16 w_widen(w_i16 x) { return x; }
W_FN w_i8 w_widen(w_i8 x) { return x; }
W_FN w_u8 w_widen(w_u8 x) { return x; }
template <class T> W_FN T w_narrow(typename w_reg<T>::type x) { return x; }
template <> __device__ __forceinline__ w_f16 w_narrow<w_f16>(w_f32 x) { return w_f16{w_narrow_f16(x)}; }
template <> __device__ __forceinline__ w_bf16 w_narrow<w_bf16>(w_f32 x) { return w_bf16{w_narrow_bf16(x)}; }
W_FN w_f32 w_round_f16(w_f32 x) { return w_widen(w_narrow<w_f16>(x)); }
W_FN w_f32 w_round_bf16(w_f32 x) { return w_widen(w_narrow<w_bf16>(x)); }
template <class T> W_FN typename w_reg<T>::type w_ld(const T* p) { return w_widen(*p); }
W_FN bool w_ld(const w_bool* p) { return *(const w_u8*)p != 0; }
template <class T> W_FN void w_st(T* p, typename w_reg<T>::type x) { *p = w_narrow<T>(x); }

// N neighbours at once; p is a multiple of their common size
template <int N> struct alignas(N) w_chunk { unsigned x[N / 4]; };
template <> struct alignas(2) w_chunk<2> { unsigned short x[1]; };
template <class T, class W> W_FN typename w_reg<T>::type w_part(W word, int at, const T*) {
  return w_widen(w_bits<T>((unsigned short)(word >> (16 * at))));
}
W_FN w_i16 w_part(unsigned word, int at, const w_i16*) { return (w_i16)(word >> (16 * at)); }
W_FN w_i8 w_part(unsigned word, int at, const w_i8*) { return (w_i8)(word >> (8 * at)); }
W_FN w_u8 w_part(unsigned word, int at, const w_u8*) { return (w_u8)(word >> (8 * at)); }
W_FN bool w_part(unsigned word, int at, const w_bool*) { return (word >> (8 * at) & 255u) != 0; }
W_FN w_f32 w_part(unsigned word, int, const w_f32*) { return w_bits<w_f32>(word); }
W_FN w_i32 w_part(unsigned word, int, const w_i32*) { return (w_i32)word; }
template <int N, class T> W_FN void w_ldv(const T* p, typename w_reg<T>::type (&x)[N]) {
  typedef w_chunk<(int)(N * sizeof(T))> C;
  C c = *(const C*)p;
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      x[i] = w_bits<T>((unsigned long long)c.x[2 * i] | (unsigned long long)c.x[2 * i + 1] << 32);
  } else {
    constexpr int each = (int)(sizeof(c.x[0]) / sizeof(T));
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = w_part((unsigned)c.x[i / each], i % each, (const T*)0);
  }
}
template <class T> W_FN unsigned w_raw(typename w_reg<T>::type x) { return (unsigned)x; }
template <> __device__ __forceinline__ unsigned w_raw<w_f32>(w_f32 x) { return w_bits<unsigned>(x); }
template <int N, class T> W_FN void w_stv(T* p, const typename w_reg<T>::type (&x)[N]) {
  typedef w_chunk<(int)(N * sizeof(T))> C;
  C c;
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      unsigned long long b = w_bits<unsigned long long>(x[i]);
      c.x[2 * i] = (unsigned)b, c.x[2 * i + 1] = (unsigned)(b >> 32);
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) c.x[i] = w_raw<T>(x[i]);
  } else {
    constexpr int each = (int)(sizeof(c.x[0]) / sizeof(T));
    constexpr unsigned low = sizeof(T) == 1 ? 255u : 65535u;
#pragma unroll
    for (int i = 0; i < N / each; ++i) {
      unsigned word = 0;
#pragma unroll
      for (int j = 0; j < each; ++j) word |= (w_raw<T>(x[each * i + j]) & low) << (8 * (int)sizeof(T) * j);
      c.x[i] = word;
    }
  }
  *(C*)p = c;
}
#define W_STV16(F) \
  template <int N> W_FN void w_stv(w_##F* p, const w_f32 (&x)[N]) { \
    w_chunk<2 * N> c; \
    _Pragma("unroll") for (int i = 0; i < N / 2; ++i) c.x[i] = w_narrow2_##F(x[2 * i], x[2 * i + 1]); \
    *(w_chunk<2 * N>*)p = c; \
  }
W_STV16(f16) W_STV16(bf16)

// integers: wrap, never trap
template <class T> struct w_unsigned { typedef unsigned type; };
template <> struct w_unsigned<w_i64> { typedef unsigned long long type; };
template <class T> W_FN T w_add(T a, T b) { typedef typename w_unsigned<T>::type U; return (T)((U)a + (U)b); }
template <class T> W_FN T w_sub(T a, T b) { typedef typename w_unsigned<T>::type U; return (T)((U)a - (U)b); }
template <class T> W_FN T w_mul(T a, T b) { typedef typename w_unsigned<T>::type U; return (T)((U)a * (U)b); }
template <class T> W_FN T w_neg(T a) { return w_sub((T)0, a); }
template <class T> W_FN T w_idiv(T a, T b) { return b == 0 ? (T)0 : (T)-1 < 0 && b == (T)-1 ? w_neg(a) : (T)(a / b); }
template <class T> W_FN T w_imod_trunc(T a, T b) { return b == 0 || ((T)-1 < 0 && b == (T)-1) ? (T)0 : (T)(a % b); }
template <class T> W_FN T w_imod_floor(T a, T b) {
  T r = w_imod_trunc(a, b);
  return r != 0 && (r < 0) != (b < 0) ? (T)(r + b) : r;
}
template <class T> W_FN T w_ipow(T a, T b) {
  if (b < 0) return a == 1 ? (T)1 : a == (T)-1 ? (b & 1 ? (T)-1 : (T)1) : (T)0;
  T r = 1;
  for (; b; b >>= 1, a = w_mul(a, a)) if (b & 1) r = w_mul(r, a);
  return r;
}
template <class T> W_FN T w_shl(T a, T b) {
  typedef typename w_unsigned<T>::type U;
  return (T)((U)a << (U)(b & (T)(8 * sizeof(T) - 1)));
}
template <class T> W_FN T w_shr(T a, T b) { return (T)(a >> (b & (T)(8 * sizeof(T) - 1))); }

// conversions
#define W_TO(NAME) \
  template <class T> W_FN w_##NAME w_to_##NAME(T x) { return (w_##NAME)x; } \
  W_FN w_##NAME w_from_bool_##NAME(bool x) { return (w_##NAME)x; }
W_TO(f32) W_TO(f64) W_TO(i64) W_TO(i32) W_TO(i16) W_TO(i8) W_TO(u8)

// simple arithmetic
W_FN w_f32 w_abs(w_f32 x) { return fabsf(x); }
W_FN w_f64 w_abs(w_f64 x) { return fabs(x); }
template <class T> W_FN T w_abs(T x) { return x < (T)0 ? w_neg(x) : x; }
W_FN w_u8 w_abs(w_u8 x) { return x; }
template <class T> W_FN T w_sign(T x) { return x > (T)0 ? (T)1 : x < (T)0 ? (T)-1 : x; }  // zero and NaN stay
template <class T> W_FN T w_select(bool m, T a, T b) { return m ? a : b; }
template <class T> W_FN T w_max(T a, T b) { return a != a ? a : b != b ? b : a > b ? a : b; }
template <class T> W_FN T w_min(T a, T b) { return a != a ? a : b != b ? b : a < b ? a : b; }
W_FN w_f32 w_max(w_f32 a, w_f32 b) { return w_max_f32(a, b); }
W_FN w_f32 w_min(w_f32 a, w_f32 b) { return w_min_f32(a, b); }
template <class T> W_FN T w_max_const(T x, T c) { return c > x ? c : x; }  // NaN stays
template <class T> W_FN T w_min_const(T x, T c) { return c < x ? c : x; }
W_FN w_f32 w_max_const(w_f32 x, w_f32 c) { return w_max_f32(x, c); }
W_FN w_f32 w_min_const(w_f32 x, w_f32 c) { return w_min_f32(x, c); }
template <class F> W_FN bool w_isnan(F x) { return x != x; }
template <class F> W_FN bool w_isinf(F x) { return w_abs(x) == (F)__builtin_inf(); }
template <class T> W_FN T w_plus(T a, T b) { return w_add(a, b); }
template <class T> W_FN T w_times(T a, T b) { return w_mul(a, b); }
W_FN w_f32 w_plus(w_f32 a, w_f32 b) { return a + b; }
W_FN w_f64 w_plus(w_f64 a, w_f64 b) { return a + b; }
W_FN w_f32 w_times(w_f32 a, w_f32 b) { return a * b; }
W_FN w_f64 w_times(w_f64 a, w_f64 b) { return a * b; }

// elementary functions
#define W_MATH1(NAME, F32, F64) \
  W_FN w_f32 w_##NAME(w_f32 x) { return F32(x); } \
  W_FN w_f64 w_##NAME(w_f64 x) { return F64(x); }
W_MATH1(sqrt, sqrtf, sqrt) W_MATH1(floor, floorf, floor) W_MATH1(ceil, ceilf, ceil) W_MATH1(trunc, truncf, trunc)
W_MATH1(round, rintf, rint) W_MATH1(exp, expf, exp) W_MATH1(expm1, expm1f, expm1) W_MATH1(log, logf, log)
W_MATH1(log1p, log1pf, log1p) W_MATH1(erf, erff, erf) W_MATH1(tanh, tanhf, tanh) W_MATH1(sin, sinf, sin)
W_MATH1(cos, cosf, cos) W_MATH1(tan, tanf, tan) W_MATH1(asin, asinf, asin) W_MATH1(acos, acosf, acos)
W_MATH1(atan, atanf, atan) W_MATH1(sinh, sinhf, sinh) W_MATH1(cosh, coshf, cosh) W_MATH1(asinh, asinhf, asinh)
W_MATH1(acosh, acoshf, acosh) W_MATH1(atanh, atanhf, atanh)
W_FN w_f32 w_pow(w_f32 a, w_f32 b) { return powf(a, b); }
W_FN w_f64 w_pow(w_f64 a, w_f64 b) { return pow(a, b); }
W_FN w_f32 w_atan2(w_f32 a, w_f32 b) { return atan2f(a, b); }
W_FN w_f64 w_atan2(w_f64 a, w_f64 b) { return atan2(a, b); }
W_FN w_f32 w_fmod_trunc(w_f32 a, w_f32 b) { return fmodf(a, b); }
W_FN w_f64 w_fmod_trunc(w_f64 a, w_f64 b) { return fmod(a, b); }
template <class F> W_FN F w_fmod_floor(F a, F b) {
  F r = w_fmod_trunc(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
template <class F> W_FN F w_pow_half(F x) { return x == -(F)__builtin_inf() ? (F)__builtin_inf() : w_sqrt(x + (F)0); }

// indices
W_FN w_signed w_clamp(w_signed i, w_signed n) { return i < 0 ? 0 : i >= n ? n - 1 : i; }
W_FN w_signed w_clamp_index(w_i64 i, w_i64 n) { return (w_signed)(i < 0 ? 0 : i >= n ? n - 1 : i); }
W_FN w_signed w_reflect(w_signed i, w_signed n) { return i < 0 ? -i : i >= n ? 2 * (n - 1) - i : i; }
W_FN w_signed w_least(w_signed a, w_signed b) { return a < b ? a : b; }
W_FN w_signed w_most(w_signed a, w_signed b) { return a > b ? a : b; }
W_FN bool w_inside(w_index i, w_index n) { return i < n; }

// exchange within a warp, and among the blocks of a cluster
template <class T> W_FN T w_shfl(T x, int mask) {
  if constexpr (sizeof(T) == 8) {
    unsigned long long b = w_bits<unsigned long long>(x);
    unsigned lo = w_shfl_word((unsigned)b, mask), hi = w_shfl_word((unsigned)(b >> 32), mask);
    return w_bits<T>((unsigned long long)hi << 32 | lo);
  } else if constexpr (sizeof(T) == 4) {
    return w_bits<T>(w_shfl_word(w_bits<unsigned>(x), mask));
  } else {
    return (T)w_shfl_word((unsigned)x, mask);
  }
}
template <class T> struct w_slot { alignas(8) T x; };
template <class T> W_FN T w_remote(const w_slot<T>* p, unsigned rank) {
  static_assert(sizeof(w_slot<T>) == 8, "a slot is two words");
  const unsigned* q = (const unsigned*)p;
  w_slot<T> s;
  unsigned words[2] = {w_cluster_word(q, rank), w_cluster_word(q + 1, rank)};
  memcpy(&s, words, 8);
  return s.x;
}
// position of an extremum: the better value, then the first position; NaN is better than any number
template <class T> W_FN bool w_above(T x, w_i32 i, T y, w_i32 j) {
  if (x != x) return y == y || i < j;
  return y == y && (x > y || (x == y && i < j));
}
template <class T> W_FN bool w_below(T x, w_i32 i, T y, w_i32 j) {
  if (x != x) return y == y || i < j;
  return y == y && (x < y || (x == y && i < j));
}
