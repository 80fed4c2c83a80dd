// 1 + erf(x) within 1.5e-7, for results of 16 bits. Source: Abramowitz and Stegun, 7.1.26, as erfc of the absolute value.
W_FN w_f32 w_rough_one_plus_erf(w_f32 x) {
  const w_f32 a = fabsf(x), d = fmaf(0.3275911f, a, 1.0f);
#ifdef __CUDA_ARCH__
  w_f32 t, e;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(d));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(a * a * -1.4426950408889634f));
#else
  const w_f32 t = 1.0f / d, e = expf(-a * a);
#endif
  w_f32 y = fmaf(t, 1.061405429f, -1.453152027f);
  y = fmaf(y, t, 1.421413741f);
  y = fmaf(y, t, -0.284496736f);
  y = fmaf(y, t, 0.254829592f) * t * e;
  return x < 0.0f ? y : 2.0f - y;  // NaN stays
}
