// The part of cuBLASLt that Weft calls, on the host, in f32 and 8-bit floats: column-major, as its documentation says.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cmath>

struct Desc {
  int32_t compute, scale, ta, tb, epilogue;
  const void* bias;
  const float *scale_a, *scale_b;
  int8_t fast;
};
struct Layout { int32_t type; uint64_t rows, cols; int64_t ld; };
struct Found { uint64_t algorithm[8]; size_t workspace; int32_t state; float waves; int32_t reserved[4]; };
static int alive = 0;
static bool is_float8(const Layout* l) { return l->type == 28 || l->type == 29; }
static double number(int type, const void* p, uint64_t i) {  // f32, bf16, e4m3 or e5m2
  if (type == 0) return ((const float*)p)[i];
  if (type == 14) {
    const uint32_t bits = (uint32_t)((const uint16_t*)p)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }
  const int byte = ((const uint8_t*)p)[i], mantissa = type == 28 ? 3 : 2, bias = type == 28 ? 7 : 15;
  const int exponent = (byte & 127) >> mantissa, fraction = byte & ((1 << mantissa) - 1);
  const double y = exponent ? ldexp(fraction + (1 << mantissa), exponent - bias - mantissa) : ldexp(fraction, 1 - bias - mantissa);
  return byte & 128 ? -y : y;
}
static void put(int type, void* p, uint64_t i, double x) {
  const float y = (float)x;
  if (type == 0) { ((float*)p)[i] = y; return; }
  uint32_t bits;
  memcpy(&bits, &y, 4);
  ((uint16_t*)p)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

extern "C" {
int stub_alive() { return alive; }
size_t cublasLtGetVersion() { return 130000; }
int cublasLtCreate(void** h) { *h = &alive; return 0; }
int cublasLtMatmulDescCreate(Desc** d, int32_t compute, int32_t scale) {
  ++alive; *d = new Desc{compute, scale, 0, 0, 1, nullptr, nullptr, nullptr, 0}; return 0;
}
int cublasLtMatmulDescDestroy(Desc* d) { --alive; delete d; return 0; }
int cublasLtMatmulDescSetAttribute(Desc* d, int32_t which, const void* value, size_t size) {
  void* to = which == 3 ? (void*)&d->ta : which == 4 ? (void*)&d->tb : which == 7 ? (void*)&d->epilogue
             : which == 8 ? (void*)&d->bias : which == 17 ? (void*)&d->scale_a : which == 18 ? (void*)&d->scale_b
             : which == 25 ? (void*)&d->fast : nullptr;
  const bool pointer = which == 8 || which == 17 || which == 18;
  if (!to || size != (pointer ? 8 : which == 25 ? 1 : 4)) return 7;
  memcpy(to, value, size);
  return 0;
}
int cublasLtMatrixLayoutCreate(Layout** l, int32_t type, uint64_t rows, uint64_t cols, int64_t ld) {
  if (ld < (int64_t)rows) return 7;
  ++alive; *l = new Layout{type, rows, cols, ld}; return 0;
}
int cublasLtMatrixLayoutDestroy(Layout* l) { --alive; delete l; return 0; }
int cublasLtMatmulPreferenceCreate(uint64_t** p) { ++alive; *p = new uint64_t(0); return 0; }
int cublasLtMatmulPreferenceSetAttribute(uint64_t* p, int32_t which, const void* value, size_t size) {
  if (which != 1 || size != 8) return 7;
  memcpy(p, value, 8);
  return 0;
}
int cublasLtMatmulPreferenceDestroy(uint64_t* p) { --alive; delete p; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, Desc* d, Layout* a, Layout* b, Layout*, Layout* o, uint64_t* p, int32_t most,
                                   Found* found, int32_t* count) {
  if (d->compute == 77) return 15;  // this one has no TF32
  if (is_float8(a) && (!d->ta || d->tb || (a->type == 29 && b->type == 29))) return 15;
  if (is_float8(a) && (o->type != 14 || !d->scale_a || !d->scale_b)) return 7;
  if (*p < (1u << 20) || (d->epilogue & 4 && !d->bias) || (a->type != 0 && !is_float8(a))) return 7;
  *count = most < 3 ? most : 3;
  for (int i = 0; i < *count; ++i) { found[i] = Found{}; found[i].algorithm[0] = 40 + i; found[i].state = i == 1 ? 15 : 0; }
  return 0;
}
int cublasLtMatmul(void* h, Desc* d, const float* alpha, const void* A, Layout* a, const void* B, Layout* b,
                   const float* beta, const void* C, Layout* c, void* D, Layout* o, const uint64_t* algorithm, void*,
                   size_t, void*) {
  if (h != &alive || algorithm[0] < 40) return 7;
  const uint64_t m = d->ta ? a->cols : a->rows, k = d->ta ? a->rows : a->cols, n = d->tb ? b->rows : b->cols;
  if ((d->tb ? b->cols : b->rows) != k || o->rows != m || o->cols != n) return 7;
  for (uint64_t i = 0; i < m; ++i)
    for (uint64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (uint64_t q = 0; q < k; ++q)
        sum += number(a->type, A, d->ta ? i * a->ld + q : q * a->ld + i) *
               number(b->type, B, d->tb ? q * b->ld + j : j * b->ld + q);
      if (is_float8(a)) sum *= (double)*d->scale_a * *d->scale_b;
      double y = *alpha * sum + (*beta != 0 ? *beta * number(c->type, C, j * c->ld + i) : 0);
      if (d->epilogue & 4) y += number(o->type, d->bias, i);
      if (d->epilogue & 2) y = y > 0 ? y : 0;
      if (d->epilogue & 32) y = 0.5 * y * (1 + tanh(0.7978845608028654 * (y + 0.044715 * y * y * y)));
      put(o->type, D, j * o->ld + i, y);
    }
  return 0;
}
}
