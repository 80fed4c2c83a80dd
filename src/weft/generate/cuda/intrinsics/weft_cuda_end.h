// 1 + erf(x) for results of 16 bits: within 5.5e-5, and within 6.9e-5 of itself above -2.5 (1.7e-8 below, where it is
// less than 4.1e-4). The complement of the absolute value is 2^P, P a polynomial fitted to that end: one special function.
W_FN w_f32 w_rough_one_plus_erf(w_f32 x) {
  const w_f32 t = fabsf(x);
  w_f32 r = fmaf(t, -0.00199813f, 0.0246248264f);
  r = fmaf(r, t, -0.1397182494f);
  r = fmaf(r, t, -0.9248375893f);
  r = fmaf(r, t, -1.626505017f) * t;
#ifdef __CUDA_ARCH__
  w_f32 y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(r));
#else
  const w_f32 y = exp2f(r);
#endif
  return x < 0.0f ? y : 2.0f - y;  // NaN stays
}
// a / d for a divisor of 1 and an exponential: no scaling is needed, and an infinite one gives zero
W_FN w_f32 w_rough_share(w_f32 a, w_f32 d) {
#ifdef __CUDA_ARCH__
  w_f32 y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
  return a * y;
#else
  return a / d;
#endif
}
