// Functions within a few units in the last place of f32, for kernels all of whose results have 16 bits.
W_FN w_f32 w_rough_exp(w_f32 x) {
#ifdef __CUDA_ARCH__
  w_f32 y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
#else
  return expf(x);
#endif
}
W_FN w_f32 w_rough_div(w_f32 a, w_f32 b) {
#ifdef __CUDA_ARCH__
  w_f32 y;
  asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a / b;
#endif
}
W_FN w_f32 w_rough_sqrt(w_f32 x) {
#ifdef __CUDA_ARCH__
  w_f32 y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return sqrtf(x);
#endif
}
W_FN w_f32 w_rough_rsqrt(w_f32 x) {
#ifdef __CUDA_ARCH__
  w_f32 y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / sqrtf(x);
#endif
}
// 1 - 2^P(|x|); the error is at most 7e-7, so this is for sums with a constant.
W_FN w_f32 w_rough_erf(w_f32 x) {
  w_f32 t = fabsf(x), r = -0.0029441021f;
  r = fmaf(r, t, 0.029589858f);
  r = fmaf(r, t, -0.14866543f);
  r = fmaf(r, t, -0.91850942f);
  r = fmaf(r, t, -1.6278890f) * t;
#ifdef __CUDA_ARCH__
  w_f32 y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(r));
#else
  w_f32 y = exp2f(r);
#endif
  return copysignf(1.0f - y, x);
}
