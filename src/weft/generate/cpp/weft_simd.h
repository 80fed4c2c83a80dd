// Runtime of Weft's generated C++ kernels: one lane count, register types, loads and stores, IEEE arithmetic and elementary
// functions that are printed once for a scalar and for a vector. Inlined into every kernel; includes nothing.
// Needs GCC or Clang (vector extensions). WL is the number of lanes, a power of two.
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
#define W_FN static inline __attribute__((always_inline))
#define W_VEC(T) __attribute__((vector_size(sizeof(T) * WL)))
typedef w_f32 w_f32v W_VEC(w_f32);
typedef w_f64 w_f64v W_VEC(w_f64);
typedef w_i64 w_i64v W_VEC(w_i64);
typedef w_i32 w_i32v W_VEC(w_i32);
typedef w_i16 w_i16v W_VEC(w_i16);
typedef w_i8 w_i8v W_VEC(w_i8);
typedef w_u8 w_u8v W_VEC(w_u8);
typedef w_i32v w_boolv;  // a mask: 0 or -1 per lane
typedef unsigned long long w_u64v W_VEC(w_i64);
typedef unsigned w_u32v W_VEC(w_i32);
typedef unsigned short w_u16v W_VEC(w_i16);

template <class T> struct w_t;
#define W_TRAIT(T, INT, UNSIGNED, ELEMENT, LANES) \
  template <> struct w_t<T> { typedef INT I; typedef UNSIGNED U; typedef ELEMENT S; enum { n = LANES }; };
W_TRAIT(w_f32, w_i32, unsigned, w_f32, 1)
W_TRAIT(w_f64, w_i64, unsigned long long, w_f64, 1)
W_TRAIT(w_i64, w_i64, unsigned long long, w_i64, 1)
W_TRAIT(w_i32, w_i32, unsigned, w_i32, 1)
W_TRAIT(w_i16, w_i16, unsigned short, w_i16, 1)
W_TRAIT(w_i8, w_i8, unsigned char, w_i8, 1)
W_TRAIT(w_u8, w_i8, unsigned char, w_u8, 1)
W_TRAIT(w_f32v, w_i32v, w_u32v, w_f32, WL)
W_TRAIT(w_f64v, w_i64v, w_u64v, w_f64, WL)
W_TRAIT(w_i64v, w_i64v, w_u64v, w_i64, WL)
W_TRAIT(w_i32v, w_i32v, w_u32v, w_i32, WL)
W_TRAIT(w_i16v, w_i16v, w_u16v, w_i16, WL)
W_TRAIT(w_i8v, w_i8v, w_u8v, w_i8, WL)
W_TRAIT(w_u8v, w_i8v, w_u8v, w_u8, WL)
template <class To, class From> W_FN To w_bits(From x) { To y; __builtin_memcpy(&y, &x, sizeof y); return y; }

// splat
#define W_SPLAT(NAME, T) W_FN w_##NAME##v w_splat_##NAME(T x) { return w_##NAME##v{} + x; }
W_FN w_f32v w_splat_f32(w_f32 x) { return x - w_f32v{}; }
W_FN w_f64v w_splat_f64(w_f64 x) { return x - w_f64v{}; }
W_SPLAT(i64, w_i64) W_SPLAT(i32, w_i32) W_SPLAT(i16, w_i16) W_SPLAT(i8, w_i8) W_SPLAT(u8, w_u8)
W_FN w_boolv w_splat_bool(bool x) { return w_i32v{} - (w_i32)x; }
template <class V> struct w_fill;
template <> struct w_fill<w_f32> { W_FN w_f32 of(w_f32 x) { return x; } };
template <> struct w_fill<w_f64> { W_FN w_f64 of(w_f64 x) { return x; } };
template <> struct w_fill<w_f32v> { W_FN w_f32v of(w_f32 x) { return w_splat_f32(x); } };
template <> struct w_fill<w_f64v> { W_FN w_f64v of(w_f64 x) { return w_splat_f64(x); } };

// masks and selection
W_FN bool w_mask(bool m) { return m; }
W_FN w_boolv w_mask(w_i32v m) { return m; }
W_FN w_boolv w_mask(w_i64v m) { return __builtin_convertvector(m, w_i32v); }
W_FN w_boolv w_mask(w_i16v m) { return __builtin_convertvector(m, w_i32v); }
W_FN w_boolv w_mask(w_i8v m) { return __builtin_convertvector(m, w_i32v); }
template <class T> W_FN T w_select(bool m, T a, T b) { return m ? a : b; }
W_FN w_f32v w_select(w_boolv m, w_f32v a, w_f32v b) { return m ? a : b; }
W_FN w_i32v w_select(w_boolv m, w_i32v a, w_i32v b) { return m ? a : b; }
#define W_SELECT(V, M) W_FN V w_select(w_boolv m, V a, V b) { return __builtin_convertvector(m, M) ? a : b; }
W_SELECT(w_f64v, w_i64v) W_SELECT(w_i64v, w_i64v) W_SELECT(w_i16v, w_i16v) W_SELECT(w_i8v, w_i8v) W_SELECT(w_u8v, w_i8v)
// the same with a comparison's own mask: no change of width on the way
#define W_PICK(T) W_FN T w_pick(bool m, T a, T b) { return m ? a : b; }
#define W_PICKV(V) W_FN V w_pick(w_t<V>::I m, V a, V b) { return m ? a : b; }
W_PICK(w_f32) W_PICK(w_f64) W_PICK(w_i64) W_PICK(w_i32) W_PICK(w_i16) W_PICK(w_i8) W_PICK(w_u8) W_PICK(bool)
W_PICKV(w_f32v) W_PICKV(w_f64v) W_PICKV(w_i64v) W_PICKV(w_i32v) W_PICKV(w_i16v) W_PICKV(w_i8v) W_PICKV(w_u8v)

// 16-bit floats
W_FN w_f32 w_widen(w_bf16 x) { return w_bits<w_f32>((unsigned)x.bits << 16); }
W_FN w_f32v w_widen_bf16(w_u16v x) { return (w_f32v)(__builtin_convertvector(x, w_u32v) << 16); }
W_FN unsigned w_bf16_bits(unsigned x) {
  return (x & 0x7fffffffu) > 0x7f800000u ? (x >> 16) | 0x40u : (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
}
W_FN w_u32v w_bf16_bits(w_u32v x) {
  w_u32v rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  return (w_i32v)((x & 0x7fffffffu) > 0x7f800000u) ? (x >> 16) | 0x40u : rounded;
}
W_FN w_bf16 w_narrow_bf16(w_f32 x) { return w_bf16{(unsigned short)w_bf16_bits(w_bits<unsigned>(x))}; }
W_FN w_u16v w_narrow_bf16(w_f32v x) { return __builtin_convertvector(w_bf16_bits((w_u32v)x), w_u16v); }
#ifdef __F16C__
typedef short w_8hi __attribute__((vector_size(16)));
typedef float w_4sf __attribute__((vector_size(16)));
typedef float w_8sf __attribute__((vector_size(32)));
W_FN w_f32 w_widen(w_f16 x) {
  return __builtin_ia32_vcvtph2ps((w_8hi){(short)x.bits, 0, 0, 0, 0, 0, 0, 0})[0];
}
W_FN w_f16 w_narrow_f16(w_f32 x) {
  return w_f16{(unsigned short)__builtin_ia32_vcvtps2ph((w_4sf){x, 0, 0, 0}, 0)[0]};
}
#else
W_FN w_f32 w_widen(w_f16 x) {
  unsigned s = (unsigned)(x.bits & 0x8000u) << 16, m = x.bits & 0x7fffu;
  if (m >= 0x7c00u) return w_bits<w_f32>(s | 0x7f800000u | (m & 0x3ffu) << 13);
  w_f32 y = w_bits<w_f32>(m << 13) * 0x1p112f;
  return w_bits<w_f32>(w_bits<unsigned>(y) | s);
}
W_FN w_f16 w_narrow_f16(w_f32 x) {
  unsigned b = w_bits<unsigned>(x), s = b >> 16 & 0x8000u, m = b & 0x7fffffffu;
  if (m > 0x7f800000u) return w_f16{(unsigned short)(s | 0x7e00u)};
  if (m >= 0x47800000u) return w_f16{(unsigned short)(s | 0x7c00u)};
  if (m < 0x38800000u) return w_f16{(unsigned short)(s | (w_bits<unsigned>(w_bits<w_f32>(m) + 0.5f) - 0x3f000000u))};
  return w_f16{(unsigned short)(s | (m - 0x38000000u + 0xfffu + (m >> 13 & 1u)) >> 13)};
}
#endif
W_FN w_f32v w_widen_f16(w_u16v x) {
#if defined(__AVX512F__) && WL == 16
  return (w_f32v)__builtin_ia32_vcvtph2ps512_mask((w_i16v)x, w_f32v{}, -1, 4);
#elif defined(__F16C__) && WL == 8
  return (w_f32v)__builtin_ia32_vcvtph2ps256((w_8hi)x);
#else
  w_f32v y = {};
  for (int i = 0; i < WL; ++i) y[i] = w_widen(w_f16{x[i]});
  return y;
#endif
}
W_FN w_u16v w_narrow_f16(w_f32v x) {
#if defined(__AVX512F__) && WL == 16
  return (w_u16v)__builtin_ia32_vcvtps2ph512_mask(x, 0, w_i16v{}, -1);
#elif defined(__F16C__) && WL == 8
  return (w_u16v)__builtin_ia32_vcvtps2ph256(x, 0);
#else
  w_u16v y = {};
  for (int i = 0; i < WL; ++i) y[i] = w_narrow_f16((w_f32)x[i]).bits;
  return y;
#endif
}
W_FN w_f32 w_round_bf16(w_f32 x) { return w_widen(w_narrow_bf16(x)); }
W_FN w_f32v w_round_bf16(w_f32v x) { return w_widen_bf16(w_narrow_bf16(x)); }
W_FN w_f32 w_round_f16(w_f32 x) { return w_widen(w_narrow_f16(x)); }
W_FN w_f32v w_round_f16(w_f32v x) { return w_widen_f16(w_narrow_f16(x)); }

// memory: ld and st convert between the storage type and the register type
template <class V> W_FN V w_raw(const void* p) { V x; __builtin_memcpy(&x, p, sizeof x); return x; }
template <class V> W_FN void w_put(void* p, V x) { __builtin_memcpy(p, &x, sizeof x); }
template <class V> W_FN V w_raw_n(const void* p, long n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64 && sizeof(typename w_t<V>::S) == 4) {
    typedef int V16 __attribute__((vector_size(64)));
    return (V)__builtin_ia32_loaddqusi512_mask((const int*)p, V16{}, (unsigned short)((1u << n) - 1u));
  }
  if constexpr (sizeof(V) == 64 && sizeof(typename w_t<V>::S) == 8) {
    typedef long long V8 __attribute__((vector_size(64)));
    return (V)__builtin_ia32_loaddqudi512_mask((const long long*)p, V8{}, (unsigned char)((1u << n) - 1u));
  }
#endif
  typedef typename w_t<V>::S S;
  V x = {};
  for (long i = 0; i < n; ++i) x[i] = ((const S*)p)[i];
  return x;
}
template <class V> W_FN void w_put_n(void* p, V x, long n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64 && sizeof(typename w_t<V>::S) == 4) {
    typedef int V16 __attribute__((vector_size(64)));
    __builtin_ia32_storedqusi512_mask((int*)p, (V16)x, (unsigned short)((1u << n) - 1u));
    return;
  }
  if constexpr (sizeof(V) == 64 && sizeof(typename w_t<V>::S) == 8) {
    typedef long long V8 __attribute__((vector_size(64)));
    __builtin_ia32_storedqudi512_mask((long long*)p, (V8)x, (unsigned char)((1u << n) - 1u));
    return;
  }
#endif
  typedef typename w_t<V>::S S;
  for (long i = 0; i < n; ++i) ((S*)p)[i] = x[i];
}
template <> struct w_t<w_u16v> { typedef w_i16v I; typedef w_u16v U; typedef unsigned short S; enum { n = WL }; };
template <> struct w_t<w_u32v> { typedef w_i32v I; typedef w_u32v U; typedef unsigned S; enum { n = WL }; };
#define W_MEMORY(T) \
  W_FN T w_ld(const T* p) { return *p; } \
  W_FN void w_st(T* p, T x) { *p = x; } \
  W_FN T##v w_ldv(const T* p) { return w_raw<T##v>(p); } \
  W_FN T##v w_ldv_n(const T* p, long n) { return w_raw_n<T##v>(p, n); } \
  W_FN void w_stv(T* p, T##v x) { w_put(p, x); } \
  W_FN void w_stv_n(T* p, T##v x, long n) { w_put_n(p, x, n); }
W_MEMORY(w_f32) W_MEMORY(w_f64) W_MEMORY(w_i64) W_MEMORY(w_i32) W_MEMORY(w_i16) W_MEMORY(w_i8) W_MEMORY(w_u8)
W_FN bool w_ld(const w_bool* p) { return *(const w_u8*)p != 0; }
W_FN void w_st(w_bool* p, bool x) { *(w_u8*)p = x; }
W_FN w_boolv w_ldv(const w_bool* p) { return __builtin_convertvector(w_raw<w_u8v>(p), w_i32v) != 0; }
W_FN w_boolv w_ldv_n(const w_bool* p, long n) { return __builtin_convertvector(w_raw_n<w_u8v>(p, n), w_i32v) != 0; }
W_FN void w_stv(w_bool* p, w_boolv x) { w_put(p, __builtin_convertvector(x & 1, w_u8v)); }
W_FN void w_stv_n(w_bool* p, w_boolv x, long n) { w_put_n(p, __builtin_convertvector(x & 1, w_u8v), n); }
#define W_MEMORY16(F) \
  W_FN w_f32 w_ld(const w_##F* p) { return w_widen(*p); } \
  W_FN void w_st(w_##F* p, w_f32 x) { *p = w_narrow_##F(x); } \
  W_FN w_f32v w_ldv(const w_##F* p) { return w_widen_##F(w_raw<w_u16v>(p)); } \
  W_FN w_f32v w_ldv_n(const w_##F* p, long n) { return w_widen_##F(w_raw_n<w_u16v>(p, n)); } \
  W_FN void w_stv(w_##F* p, w_f32v x) { w_put(p, w_narrow_##F(x)); } \
  W_FN void w_stv_n(w_##F* p, w_f32v x, long n) { w_put_n(p, w_narrow_##F(x), n); }
W_MEMORY16(f16) W_MEMORY16(bf16)

// every second element, or elements backwards; neither reads past the first and last element that it returns
template <class V> W_FN V w_raw_2(const typename w_t<V>::S* p) {
  V x;
#ifdef __clang__
  for (int i = 0; i < WL; ++i) x[i] = p[2 * i];
#else
  typename w_t<V>::I k = {};
  for (int i = 0; i < WL; ++i) k[i] = 2 * i < WL ? 2 * i : 2 * i + 1;
  x = __builtin_shuffle(w_raw<V>(p), w_raw<V>(p + WL - 1), k);
#endif
  return x;
}
template <class V> W_FN V w_raw_reversed(const typename w_t<V>::S* p) {
  V x;
#ifdef __clang__
  for (int i = 0; i < WL; ++i) x[i] = p[-i];
#else
  typename w_t<V>::I k = {};
  for (int i = 0; i < WL; ++i) k[i] = WL - 1 - i;
  x = __builtin_shuffle(w_raw<V>(p - (WL - 1)), k);
#endif
  return x;
}
#define W_STRIDED(T) \
  W_FN T##v w_ldv_2(const T* p) { return w_raw_2<T##v>(p); } \
  W_FN T##v w_ldv_reversed(const T* p) { return w_raw_reversed<T##v>(p); }
W_STRIDED(w_f32) W_STRIDED(w_f64) W_STRIDED(w_i64) W_STRIDED(w_i32)
#if defined(__AVX512F__) && WL == 16 && !defined(__clang__)
W_FN w_f32v w_gather(const w_f32* p, w_i32v k) { return __builtin_ia32_gathersiv16sf(w_f32v{}, p, k, (unsigned short)-1, 4); }
W_FN w_i32v w_gather(const w_i32* p, w_i32v k) { return __builtin_ia32_gathersiv16si(w_i32v{}, p, k, (unsigned short)-1, 4); }
#else
W_FN w_f32v w_gather(const w_f32* p, w_i32v k) { w_f32v x = {}; for (int i = 0; i < WL; ++i) x[i] = p[k[i]]; return x; }
W_FN w_i32v w_gather(const w_i32* p, w_i32v k) { w_i32v x = {}; for (int i = 0; i < WL; ++i) x[i] = p[k[i]]; return x; }
#endif
// tile[u * WL + v] = p[v * stride + u] for u < rows <= 16, v < columns <= WL
template <class T> W_FN void w_transpose(T* tile, const T* p, long stride, long rows, long columns) {
#ifndef __clang__
  if constexpr (WL == 16 && sizeof(T) == 4) {
    if (__builtin_expect(rows == 16 && columns == 16, 1)) {
      w_i32v r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) r[i] = w_raw<w_i32v>(p + i * stride);
#pragma GCC unroll 4
      for (int s = 8; s > 0; s /= 2) {
        w_i32v low = {}, high = {};
#pragma GCC unroll 16
        for (int k = 0; k < 16; ++k) { low[k] = k & s ? 16 + k - s : k; high[k] = k & s ? 16 + k : k + s; }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          if (i & s) continue;
          w_i32v a = r[i], b = r[i + s];
          r[i] = __builtin_shuffle(a, b, low);
          r[i + s] = __builtin_shuffle(a, b, high);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) w_put(tile + i * WL, r[i]);
      return;
    }
  }
#endif
  for (long v = 0; v < columns; ++v)
    for (long u = 0; u < rows; ++u) tile[u * WL + v] = p[v * stride + u];
}

// integers: wrap, never trap
template <class T> W_FN T w_add(T a, T b) { typedef typename w_t<T>::U U; return (T)((U)a + (U)b); }
template <class T> W_FN T w_sub(T a, T b) { typedef typename w_t<T>::U U; return (T)((U)a - (U)b); }
template <class T> W_FN T w_mul(T a, T b) {
  typedef typename w_t<T>::U U;
  if constexpr (w_t<T>::n == 1 && sizeof(T) < 4) return (T)((unsigned)a * (unsigned)b);  // u16*u16 would overflow int
  else return (T)((U)a * (U)b);
}
template <class T> W_FN T w_neg(T a) { return w_sub(T{}, a); }
template <class T> W_FN T w_idiv1(T a, T b) { return b == 0 ? (T)0 : (T)-1 < 0 && b == (T)-1 ? w_neg(a) : (T)(a / b); }
template <class T> W_FN T w_imod1(T a, T b) { return b == 0 || ((T)-1 < 0 && b == (T)-1) ? (T)0 : (T)(a % b); }
template <class T> W_FN T w_imodf1(T a, T b) { T r = w_imod1(a, b); return r != 0 && (r < 0) != (b < 0) ? (T)(r + b) : r; }
template <class T> W_FN T w_ipow1(T a, T b) {
  if (b < 0) return a == 1 ? (T)1 : a == (T)-1 ? (b & 1 ? (T)-1 : (T)1) : (T)0;
  T r = 1;
  for (; b; b >>= 1, a = w_mul(a, a)) if (b & 1) r = w_mul(r, a);
  return r;
}
#define W_LANES2(NAME, ONE) \
  template <class T> W_FN T NAME(T a, T b) { \
    if constexpr (w_t<T>::n == 1) return ONE(a, b); \
    else { T r = {}; for (int i = 0; i < WL; ++i) r[i] = ONE((typename w_t<T>::S)a[i], (typename w_t<T>::S)b[i]); return r; } \
  }
#define W_LANES1(NAME, ONE) \
  template <class T> W_FN T NAME(T a) { \
    if constexpr (w_t<T>::n == 1) return ONE(a); \
    else { T r = {}; for (int i = 0; i < WL; ++i) r[i] = ONE((typename w_t<T>::S)a[i]); return r; } \
  }
W_LANES2(w_idiv, w_idiv1) W_LANES2(w_imod_trunc, w_imod1) W_LANES2(w_imod_floor, w_imodf1) W_LANES2(w_ipow, w_ipow1)
template <class T> W_FN T w_shl(T a, T b) {
  typedef typename w_t<T>::U U; typedef typename w_t<T>::S S;
  return (T)((U)a << (U)(b & (S)(8 * sizeof(S) - 1)));
}
template <class T> W_FN T w_shr(T a, T b) { typedef typename w_t<T>::S S; return (T)(a >> (b & (S)(8 * sizeof(S) - 1))); }

// conversions
#define W_TO(NAME) \
  template <class T> W_FN w_##NAME w_to_##NAME(T x) { return (w_##NAME)x; } \
  template <class T> W_FN w_##NAME##v w_to_##NAME##v(T x) { return __builtin_convertvector(x, w_##NAME##v); } \
  W_FN w_##NAME w_from_bool_##NAME(bool x) { return (w_##NAME)x; } \
  W_FN w_##NAME##v w_from_bool_##NAME##v(w_boolv x) { return __builtin_convertvector(x & 1, w_##NAME##v); }
W_TO(f32) W_TO(f64) W_TO(i64) W_TO(i32) W_TO(i16) W_TO(i8) W_TO(u8)

// simple arithmetic
template <class F> W_FN F w_fabs(F x) { typedef typename w_t<F>::I I; typedef typename w_t<F>::U U; return w_bits<F>((I)(w_bits<U>(x) << 1 >> 1)); }
template <class F> W_FN F w_signbit_of(F x, F s) {  // |x| with the sign of s
  typedef typename w_t<F>::U U;
  U b = w_bits<U>(s), top = b ^ (b << 1 >> 1);
  return w_bits<F>((w_bits<U>(x) << 1 >> 1) | top);
}
W_FN w_f32 w_abs(w_f32 x) { return w_fabs(x); }
W_FN w_f64 w_abs(w_f64 x) { return w_fabs(x); }
W_FN w_f32v w_abs(w_f32v x) { return w_fabs(x); }
W_FN w_f64v w_abs(w_f64v x) { return w_fabs(x); }
template <class T> W_FN T w_abs(T x) { return w_pick(x < T{}, w_neg(x), x); }
W_FN w_u8 w_abs(w_u8 x) { return x; }
W_FN w_u8v w_abs(w_u8v x) { return x; }
template <class T> W_FN T w_sign(T x) {
  typedef typename w_t<T>::S S;
  T one = T{} + (S)1;
  T r = w_pick(x > T{}, one, w_pick(x < T{}, (T)(T{} - one), x));  // zero and NaN stay
  return r;
}
template <class T> W_FN T w_above(T a, T b) { return w_pick(a > b, a, b); }  // b where either is NaN: one instruction
template <class T> W_FN T w_below(T a, T b) { return w_pick(a < b, a, b); }
#if defined(__AVX512F__) && WL == 16 && !defined(__clang__)
W_FN w_f32v w_above(w_f32v a, w_f32v b) { return __builtin_ia32_maxps512_mask(a, b, a, -1, 4); }
W_FN w_f32v w_below(w_f32v a, w_f32v b) { return __builtin_ia32_minps512_mask(a, b, a, -1, 4); }
#elif defined(__AVX__) && WL == 8 && !defined(__clang__)
W_FN w_f32v w_above(w_f32v a, w_f32v b) { return __builtin_ia32_maxps256(a, b); }
W_FN w_f32v w_below(w_f32v a, w_f32v b) { return __builtin_ia32_minps256(a, b); }
#endif
template <class T> W_FN T w_max(T a, T b) { return w_pick(a != a, a, w_above(a, b)); }
template <class T> W_FN T w_min(T a, T b) { return w_pick(a != a, a, w_below(a, b)); }
template <class T> W_FN T w_max_const(T x, T c) { return w_above(c, x); }
template <class T> W_FN T w_min_const(T x, T c) { return w_below(c, x); }
template <class F> W_FN auto w_isnan(F x) { return w_mask(x != x); }
template <class F> W_FN auto w_isinf(F x) { return w_mask(w_fabs(x) == w_fill<F>::of(__builtin_inf())); }
W_FN w_f32 w_sqrt(w_f32 x) { return __builtin_sqrtf(x); }
W_FN w_f64 w_sqrt(w_f64 x) { return __builtin_sqrt(x); }
W_FN w_f32v w_sqrt(w_f32v x) {
#if defined(__AVX512F__) && WL == 16
  return __builtin_ia32_sqrtps512_mask(x, x, -1, 4);
#elif defined(__AVX__) && WL == 8
  return __builtin_ia32_sqrtps256(x);
#else
  w_f32v y = {};
  for (int i = 0; i < WL; ++i) y[i] = __builtin_sqrtf(x[i]);
  return y;
#endif
}
W_FN w_f64v w_sqrt(w_f64v x) {
#if defined(__AVX512F__) && WL == 8
  return __builtin_ia32_sqrtpd512_mask(x, x, -1, 4);
#else
  w_f64v y = {};
  for (int i = 0; i < WL; ++i) y[i] = __builtin_sqrt(x[i]);
  return y;
#endif
}
template <class F> struct w_magic;  // numbers from here up are whole
template <> struct w_magic<w_f32> { W_FN w_f32 whole() { return 0x1p23f; } };
template <> struct w_magic<w_f64> { W_FN w_f64 whole() { return 0x1p52; } };
template <class F> W_FN F w_round(F x) {  // ties to even: adding 2^23 rounds at the units
  F big = w_fill<F>::of(w_magic<typename w_t<F>::S>::whole()), a = w_fabs(x);
  F r = (a + big) - big;
  return w_pick(a < big, w_signbit_of(r, x), x);
}
template <class F> W_FN F w_floor(F x) {
  F r = w_round(x), one = w_fill<F>::of(1);
  return w_signbit_of(w_pick(r > x, r - one, r), x);
}
template <class F> W_FN F w_ceil(F x) {
  F r = w_round(x), one = w_fill<F>::of(1);
  return w_signbit_of(w_pick(r < x, r + one, r), x);
}
template <class F> W_FN F w_trunc(F x) {
  F a = w_fabs(x), r = w_round(a), one = w_fill<F>::of(1);
  return w_signbit_of(w_pick(r > a, r - one, r), x);
}

// elementary functions of f32, within 2 ulp, branch-free
template <class F> W_FN F w_pow2i(typename w_t<F>::I n) { return w_bits<F>((typename w_t<F>::I)((n + 127) << 23)); }
template <class F> W_FN void w_exp_reduce(F x, F& r, typename w_t<F>::I& n) {
  F t = x * 1.44269504088896341f + 12582912.0f;
  n = w_bits<typename w_t<F>::I>(t) - 0x4b400000;
  F k = t - 12582912.0f;
  r = x - k * 0.693145751953125f;
  r = r - k * 1.42860682030941723212e-6f;
}
template <class F> W_FN F w_exp_tail(F r) {  // (e^r - 1 - r) / r^2
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  return p * r + 5.0000001201e-1f;
}
template <class F> W_FN F w_scale(F y, typename w_t<F>::I n) {
  typename w_t<F>::I half = n >> 1;  // 2^n in two steps: n reaches past both ends of the exponents
  return y * w_pow2i<F>(half) * w_pow2i<F>(n - half);
}
template <class F> W_FN F w_exp_f32(F x) {
  x = w_below(w_fill<F>::of(89.0f), x);
  x = w_above(w_fill<F>::of(-104.0f), x);
  F r; typename w_t<F>::I n;
  w_exp_reduce(x, r, n);
  F y = (w_exp_tail(r) * (r * r) + r) + 1.0f;
#if defined(__AVX512F__) && WL == 16 && !defined(__clang__)
  if constexpr (w_t<F>::n == 16) return __builtin_ia32_scalefps512_mask(y, __builtin_convertvector(n, F), y, -1, 4);
#endif
  return w_scale(y, n);
}
template <class F> W_FN F w_expm1_f32(F x) {
  F hi = w_fill<F>::of(89.0f), lo = w_fill<F>::of(-20.0f);
  F c = w_pick(x > hi, hi, x);
  c = w_pick(c < lo, lo, c);
  F r; typename w_t<F>::I n;
  w_exp_reduce(c, r, n);
  F q = w_exp_tail(r) * (r * r) + r;
  typename w_t<F>::I half = n >> 1;
  F s1 = w_pow2i<F>(half), s2 = w_pow2i<F>(n - half);
  F s = s1 * s2;
  F small = q * s + (s - 1.0f), large = (q + 1.0f) * s1 * s2;
  return w_pick(c > w_fill<F>::of(40.0f), large, small);
}
template <class F> W_FN F w_log_f32(F x) {
  typedef typename w_t<F>::I I;
  auto tiny = x < w_fill<F>::of(0x1p-126f);
  F scaled = w_pick(tiny, x * 0x1p23f, x);
  I b = w_bits<I>(scaled);
  I e = (b - 0x3f3504f3) >> 23;  // m in [sqrt(1/2), sqrt(2))
  F m = w_bits<F>(b - (e << 23)) - 1.0f;
  F k = w_pick(tiny, w_fill<F>::of(-23.0f), F{});
  if constexpr (w_t<F>::n == 1) k += (w_f32)e; else k += __builtin_convertvector(e, F);
  F z = m * m;
  F p = m * 7.0376836292e-2f + -1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m + -1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m + -1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m + -2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  F y = m * z * p;
  y = y + k * -2.12194440e-4f;
  y = y - 0.5f * z;
  y = (m + y) + k * 0.693359375f;
  F inf = w_fill<F>::of(__builtin_inff());
  y = w_pick(x == inf, inf, y);
  y = w_pick(x == F{}, -inf, y);
  y = w_pick(x < F{}, w_fill<F>::of(__builtin_nanf("")), y);
  return w_pick(x != x, x, y);
}
template <class F> W_FN F w_log1p_f32(F x) {
  F one = w_fill<F>::of(1.0f), u = one + x, y = w_log_f32(u);
  F c = (x - (u - one)) / u;
  auto keep = (y != y) | (w_fabs(y) == w_fill<F>::of(__builtin_inff()));
  y = w_pick(keep, y, y + c);
  return w_pick(u == one, x, y);
}
template <class F> W_FN F w_erf_f32(F x) {  // two ranges; after N. Juffa
  F t = w_fabs(x), s = x * x;
  t = w_below(w_fill<F>::of(10.0f), t);
  F tt = t * t;
  F u = t * -3.88396438e-3f + 2.42546219e-2f;
  F r = t * -1.72853470e-5f + 3.83197126e-4f;
  r = r * tt + u;
  r = r * t + -1.06777877e-1f;
  r = r * t + -6.34846687e-1f;
  r = r * t + -1.28717512e-1f;
  r = r * t - t;
  F far = w_signbit_of(1.0f - w_exp_f32(r), x);
  F p = s * -5.96761703e-4f + 4.99119423e-3f;
  p = p * s + -2.67681349e-2f;
  p = p * s + 1.12819925e-1f;
  p = p * s + -3.76125336e-1f;
  p = p * s + 1.28379166e-1f;
  p = p * x + x;
  return w_pick(t > w_fill<F>::of(0.927734375f), far, p);
}
#if defined(__AVX512F__) && WL == 16 && !defined(__clang__)
// 16 pieces of [0, 4), each a polynomial of degree 5 whose coefficients are looked up by one permutation (own fit)
W_FN w_f32v w_erf_f32(w_f32v x) {
  const w_f32v at = {0.0f, 0.375f, 0.625f, 0.875f, 1.125f, 1.375f, 1.625f, 1.875f, 2.125f, 2.375f, 2.625f, 2.875f, 3.125f, 3.375f, 3.625f, 3.875f};
  const w_f32v c0 = {0.0f, 0.4041168987751007f, 0.6232408881187439f, 0.7840750813484192f, 0.8883882164955139f, 0.9481700658798218f, 0.9784437417984009f, 0.9919900298118591f, 0.9973459839820862f, 0.9992170333862305f, 0.999794602394104f, 0.9999521374702454f, 0.9999901056289673f, 0.9999982118606567f, 0.9999997019767761f, 0.9999999403953552f};
  const w_f32v c1 = {0.1283791065216064f, 0.9803528189659119f, 0.7634995579719543f, 0.5247450470924377f, 0.31827396154403687f, 0.1703597754240036f, 0.08047225326299667f, 0.03354582563042641f, 0.012340819463133812f, 0.004006478004157543f, 0.001147875445894897f, 0.0002902284904848784f, 6.47587949060835e-05f, 1.2751783287967555e-05f, 2.2159335912874667e-06f, 3.3982578884206305e-07f};
  const w_f32v c2 = {1.0258831025566906e-05f, -0.3676254451274872f, -0.4771815538406372f, -0.459150493144989f, -0.3580603301525116f, -0.23424771428108215f, -0.13076940178871155f, -0.06289899349212646f, -0.02622399851679802f, -0.009514959529042244f, -0.0030128636863082647f, -0.0008342493092641234f, -0.00020230839436408132f, -4.3016836571041495e-05f, -8.027215699257795e-06f, -1.3155532769815181e-06f};
  const w_f32v c3 = {-0.37640511989593506f, -0.23487502336502075f, -0.05567479133605957f, 0.09291964769363403f, 0.16245028376579285f, 0.15793800354003906f, 0.11484193056821823f, 0.0674421414732933f, 0.033037807792425156f, 0.013730509206652641f, 0.004890281707048416f, 0.0015024231979623437f, 0.000399962707888335f, 9.256100020138547e-05f, 1.8666954929358326e-05f, 3.2867530990188243e-06f};
  const w_f32v c4 = {0.002536906860768795f, 0.16541381180286407f, 0.17549368739128113f, 0.11215278506278992f, 0.02833487279713154f, -0.029983025044202805f, -0.04938126727938652f, -0.04216305911540985f, -0.026402927935123444f, -0.013205945491790771f, -0.005466938484460115f, -0.0019085382809862494f, -0.0005682226037606597f, -0.00014534294314216822f, -3.2103664125315845e-05f, -6.146452051325468e-06f};
  const w_f32v c5 = {0.10483595728874207f, 0.045326150953769684f, -0.027035048231482506f, -0.06670918315649033f, -0.06106119602918625f, -0.030643915757536888f, -0.0023032519966363907f, 0.011328021995723248f, 0.012444212101399899f, 0.008360578678548336f, 0.004236414097249508f, 0.001727707334794104f, 0.0005842620157636702f, 0.0001665798044996336f, 4.045960304210894e-05f, 8.43044381326763e-06f};
  w_f32v t = w_below(w_splat_f32(0x1.fffffep+1f), w_fabs(x));
  w_i32v i = w_bits<w_i32v>((t - 0.125f) * 4.0f + 12582912.0f) & 15;  // rounds to the piece
  w_f32v d = t - __builtin_shuffle(at, i);
  w_f32v p = __builtin_shuffle(c5, i);
  p = p * d + __builtin_shuffle(c4, i);
  p = p * d + __builtin_shuffle(c3, i);
  p = p * d + __builtin_shuffle(c2, i);
  p = p * d + __builtin_shuffle(c1, i);
  // the first piece is t + t * small: full precision at 0
  p = p * d + w_pick(i == 0, t, __builtin_shuffle(c0, i));
  // exactly 1 from where it rounds to that: 1 + erf(x) must vanish, as gelu multiplies it with a large x
  p = w_pick(t > w_splat_f32(3.832507f), w_splat_f32(1.0f), p);
  return w_signbit_of(p, x);
}
#endif
template <class F> W_FN F w_tanh_f32(F x) {
  F a = w_fabs(x), z = x * x;
  F c = w_below(w_fill<F>::of(10.0f), a);
  F e = w_exp_f32(c + c);
  F far = w_signbit_of(1.0f - 2.0f / (e + 1.0f), x);
  F p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  p = p * z * x + x;
  return w_pick(a > w_fill<F>::of(0.625f), far, p);
}
template <class F> W_FN F w_trig_f32(F x, typename w_t<F>::I quarter) {  // sin(x + quarter*pi/2) for |x| <= 1e5
  typedef typename w_t<F>::I I;
  F t = x * 0.636619772367581343f + 12582912.0f;
  I q = (w_bits<I>(t) - 0x4b400000) + quarter;
  F j = t - 12582912.0f;
  F r = x - j * 1.57079637050628662109375f;
  r = r - j * -4.37113882867379281e-8f;
  r = r - j * -1.71512451000591467e-15f;
  F z = r * r;
  F s = z * -1.9515295891e-4f + 8.3321608736e-3f;
  s = s * z + -1.6666654611e-1f;
  s = s * z * r + r;
  F c = z * 2.443315711809948e-5f + -1.388731625493765e-3f;
  c = c * z + 4.166664568298827e-2f;
  c = c * z * z - 0.5f * z + 1.0f;
  F y = w_pick((q & 1) == I{}, s, c);
  return w_pick((q & 2) == I{}, y, -y);
}
// scalar forms through the C library: rare functions, f64, and arguments that need a long reduction
#define W_LIBM1(NAME) \
  W_FN w_f64 w_##NAME##_1(w_f64 x) { return __builtin_##NAME(x); } \
  W_FN w_f32 w_##NAME##_1(w_f32 x) { return (w_f32)__builtin_##NAME((w_f64)x); } \
  W_LANES1(w_##NAME##_libm, w_##NAME##_1)
W_LIBM1(exp) W_LIBM1(expm1) W_LIBM1(log) W_LIBM1(log1p) W_LIBM1(erf) W_LIBM1(tanh) W_LIBM1(sin) W_LIBM1(cos) W_LIBM1(tan)
W_LIBM1(asin) W_LIBM1(acos) W_LIBM1(atan) W_LIBM1(sinh) W_LIBM1(cosh) W_LIBM1(asinh) W_LIBM1(acosh) W_LIBM1(atanh)
#define W_FAST(NAME) \
  W_FN w_f32 w_##NAME(w_f32 x) { return w_##NAME##_f32(x); } \
  W_FN w_f32v w_##NAME(w_f32v x) { return w_##NAME##_f32(x); } \
  W_FN w_f64 w_##NAME(w_f64 x) { return w_##NAME##_1(x); } \
  W_FN w_f64v w_##NAME(w_f64v x) { return w_##NAME##_libm(x); }
W_FAST(exp) W_FAST(expm1) W_FAST(log) W_FAST(log1p) W_FAST(erf) W_FAST(tanh)
#define W_SLOW(NAME) template <class F> W_FN F w_##NAME(F x) { return w_##NAME##_libm(x); }
W_SLOW(tan) W_SLOW(asin) W_SLOW(acos) W_SLOW(atan) W_SLOW(sinh) W_SLOW(cosh) W_SLOW(asinh) W_SLOW(acosh) W_SLOW(atanh)
W_FN bool w_any(bool m) { return m; }
W_FN bool w_any(w_i32v m) {
  w_i64 t[sizeof(m) / 8], r = 0;
  __builtin_memcpy(t, &m, sizeof m);
  for (unsigned i = 0; i < sizeof(m) / 8; ++i) r |= t[i];
  return r != 0;
}
#ifdef __FMA__
#define W_TRIG(NAME, QUARTER) \
  template <class F> W_FN F w_##NAME##_f32(F x) { \
    typedef typename w_t<F>::I I; \
    F y = w_trig_f32(x, I{} + QUARTER); \
    if (__builtin_expect(w_any(!(w_fabs(x) <= w_fill<F>::of(1e5f))), 0)) return w_##NAME##_libm(x); \
    return y; \
  }
#else
#define W_TRIG(NAME, QUARTER) template <class F> W_FN F w_##NAME##_f32(F x) { return w_##NAME##_libm(x); }
#endif
W_TRIG(sin, 0) W_TRIG(cos, 1)
W_FAST(sin) W_FAST(cos)
W_FN w_f64 w_pow1(w_f64 a, w_f64 b) { return __builtin_pow(a, b); }
W_FN w_f32 w_pow1(w_f32 a, w_f32 b) { return (w_f32)__builtin_pow((w_f64)a, (w_f64)b); }
W_FN w_f64 w_atan21(w_f64 a, w_f64 b) { return __builtin_atan2(a, b); }
W_FN w_f32 w_atan21(w_f32 a, w_f32 b) { return (w_f32)__builtin_atan2((w_f64)a, (w_f64)b); }
W_FN w_f64 w_fmod1(w_f64 a, w_f64 b) { return __builtin_fmod(a, b); }
W_FN w_f32 w_fmod1(w_f32 a, w_f32 b) { return __builtin_fmodf(a, b); }
template <class T> W_FN T w_fmodf1(T a, T b) {
  T r = w_fmod1(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
W_LANES2(w_pow, w_pow1) W_LANES2(w_atan2, w_atan21) W_LANES2(w_fmod_trunc, w_fmod1) W_LANES2(w_fmod_floor, w_fmodf1)
template <class F> W_FN F w_pow_half(F x) {
  F inf = w_fill<F>::of(__builtin_inf());
  return w_pick(x == -inf, inf, w_sqrt(x + F{}));
}

// across lanes, in a fixed order
template <class V, int s> W_FN V w_swap_lanes(V x) {
  typedef typename w_t<V>::I I;
  I k = {};
  for (int i = 0; i < WL; ++i) k[i] = i ^ s;
#ifdef __clang__
  V y = {};
  for (int i = 0; i < WL; ++i) y[i] = x[i ^ s];
  return y;
#else
  return __builtin_shuffle(x, k);
#endif
}
#define W_ACROSS(NAME, OP) \
  template <class V> W_FN typename w_t<V>::S w_across_##NAME(V x) { \
    if constexpr (WL > 32) x = OP(x, w_swap_lanes<V, 32>(x)); \
    if constexpr (WL > 16) x = OP(x, w_swap_lanes<V, 16>(x)); \
    if constexpr (WL > 8) x = OP(x, w_swap_lanes<V, 8>(x)); \
    if constexpr (WL > 4) x = OP(x, w_swap_lanes<V, 4>(x)); \
    if constexpr (WL > 2) x = OP(x, w_swap_lanes<V, 2>(x)); \
    return OP(x, w_swap_lanes<V, 1>(x))[0]; \
  }
template <class T> W_FN T w_plus(T a, T b) { return w_add(a, b); }
template <class T> W_FN T w_times(T a, T b) { return w_mul(a, b); }
#define W_FLOAT_OPS(F) \
  W_FN F w_plus(F a, F b) { return a + b; } \
  W_FN F w_times(F a, F b) { return a * b; }
W_FLOAT_OPS(w_f32) W_FLOAT_OPS(w_f64) W_FLOAT_OPS(w_f32v) W_FLOAT_OPS(w_f64v)
W_ACROSS(sum, w_plus) W_ACROSS(prod, w_times) W_ACROSS(max, w_max) W_ACROSS(min, w_min)
W_FN bool w_across_any(w_boolv x) { return w_any(x); }
W_FN bool w_across_all(w_boolv x) { return !w_any(~x); }
W_FN w_i32v w_lanes() { w_i32v x = {}; for (int i = 0; i < WL; ++i) x[i] = i; return x; }
W_FN w_boolv w_first(long n) { return w_lanes() < w_splat_i32((w_i32)n); }
W_FN long w_clamp(long i, long n) { return i < 0 ? 0 : i >= n ? n - 1 : i; }
template <class V> W_FN w_i32v w_clamp_lanes(V i, long n) {
  typedef typename w_t<V>::S S;
  V top = V{} + (S)(n - 1);  // n is below 2^31 or the index is 64 bits wide
  i = w_pick(i < V{}, V{}, i);
  return __builtin_convertvector(w_pick(i > top, top, i), w_i32v);
}
W_FN long w_reflect(long i, long n) { return i < 0 ? -i : i >= n ? 2 * (n - 1) - i : i; }
W_FN long w_least(long a, long b) { return a < b ? a : b; }
W_FN long w_most(long a, long b) { return a > b ? a : b; }
W_FN bool w_inside(long i, long n) { return (unsigned long)i < (unsigned long)n; }
extern "C" int omp_get_num_threads();
extern "C" int omp_get_thread_num();
extern "C" int omp_get_max_threads();
