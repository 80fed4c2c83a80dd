// What the mlp template needs besides weft_cuda_tensor.h: ReLU while narrowing, activations of 16-bit results, products of
// warpgroups with the left operand in registers. Includes nothing.
#ifdef W_EMULATED
#define w_relu2_f16(a, b) w_narrow2_f16(w_max_f32(a, 0.0f), w_max_f32(b, 0.0f))
#define w_relu2_bf16(a, b) w_narrow2_bf16(w_max_f32(a, 0.0f), w_max_f32(b, 0.0f))
#define w_hold(x)
#define w_read_until(x)
W_FN w_f32 w_mlp_share(w_f32 a, w_f32 d) { return a / d; }
W_FN w_f32 w_mlp_tanh_bf16(w_f32 x) {  // with the error that the machine's may have, either way
  return tanhf(x) * (__float_as_uint(x) & 1 ? 1.00048828f : 0.99951172f);
}
W_FN w_f32 w_mlp_reciprocal(w_f32 x) { return 1.0f / x; }
W_FN u64 w_behind(u64 descriptor, u32 bytes) { return w_descriptor((u32)descriptor + bytes); }
#else
// 16 bytes to the same place of another block's shared memory; its barrier counts them
W_FN void w_mail_send(u32 to, uint4 v, u32 bar, u32 rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .b32 a, b; mapa.shared::cluster.u32 a, %0, %6; mapa.shared::cluster.u32 b, %5, %6;\n"
               " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [a], {%1, %2, %3, %4}, [b]; }"
               ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar), "r"(rank) : "memory");
#endif
}
W_FN void w_mail_wait(u32 at, u32 parity) {  // until all of a phase is there
#if __CUDA_ARCH__ >= 900
  u32 done;
  do {
    asm volatile("{ .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(at), "r"(parity) : "memory");
  } while (!done);
#endif
}
// the descriptor of what lies some bytes behind: two instructions instead of a chain of five
W_FN u64 w_behind(u64 descriptor, u32 bytes) {
  return (descriptor & 0xffffffff00000000ull) | (u32)((u32)descriptor + (bytes >> 4));
}
W_FN u32 w_relu2_f16(float lo, float hi) {
  u32 h;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(hi), "f"(lo));
  return h;
}
W_FN u32 w_relu2_bf16(float lo, float hi) {
  u32 h;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(hi), "f"(lo));
  return h;
}
W_FN void w_hold(float& x) { asm volatile("" : "+f"(x)::"memory"); }  // is not read before this
W_FN void w_read_until(u32 x) { asm volatile("" ::"r"(x) : "memory"); }  // by a product that runs until now
W_FN w_f32 w_mlp_reciprocal(w_f32 x) {
  w_f32 y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// a over a sum of 1 and an exponential: that is no smaller than 1, and where it is infinite the quotient is zero
W_FN w_f32 w_mlp_share(w_f32 a, w_f32 d) { return a * w_mlp_reciprocal(d); }
W_FN w_f32 w_mlp_tanh_bf16(w_f32 x) {  // within 2^-11 of the result
  w_f32 y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif
// a / (1 + exp(v)) and 1 + erf(u) by that tanh; the second one's own error is 4e-4 / |u| at most
W_FN w_f32 w_mlp_share_short(w_f32 a, w_f32 v) {
  const w_f32 h = 0.5f * a;
  return fmaf(h, w_mlp_tanh_bf16(-0.5f * v), h);
}
W_FN w_f32 w_mlp_one_plus_erf(w_f32 u) { return 1.0f + w_mlp_tanh_bf16(u * fmaf(u * u, 0.09814895f, 1.13159299f)); }
// h * (1 + erf(c x)) by the same
W_FN w_f32 w_mlp_gated(w_f32 h, w_f32 x, w_f32 c) {
  return fmaf(h, w_mlp_tanh_bf16(x * fmaf(x * x, 0.09814895f * c * c * c, 1.13159299f * c)), h);
}
// the same of twice the argument: h / (1 + exp(-2h)) * 2 and h * (1 + erf(2 c h))
W_FN w_f32 w_mlp_silu_of_half(w_f32 h) { return fmaf(h, w_mlp_tanh_bf16(h), h); }
W_FN w_f32 w_mlp_gelu_of_half(w_f32 h, w_f32 c) {
  return fmaf(h, w_mlp_tanh_bf16(h * fmaf(h * h, 0.7851916f * c * c * c, 2.26318598f * c)), h);
}
W_FN w_f32 w_mlp_tanh_f16(w_f32 x) {  // within 2^-16 of the result
  const w_f32 s = x * x, e = w_rough_exp(2.0f * x);
  const w_f32 near = x * fmaf(s, fmaf(s, 0.13333334f, -0.33333334f), 1.0f);
  const w_f32 far = 1.0f - 2.0f * w_mlp_reciprocal(e + 1.0f);
  return fabsf(x) < 0.1f ? near : far;  // NaN stays
}
// Sine with the phase reduced by pi in three parts, and an odd polynomial; absolute error 2.1e-7 up to 1e6.
// Beyond 1e7 neighbouring arguments are a radian apart: the result is a number within [-1, 1].
W_FN w_f32 w_mlp_sin_of(w_f32 x, w_f32 k, unsigned odd) {
  w_f32 r = fmaf(k, -3.14159274f, x);
  r = fmaf(k, 8.74227766e-8f, r);
  r = r > 1.7f ? 1.7f : r < -1.7f ? -1.7f : r;  // NaN stays
  const w_f32 s = r * r;
  w_f32 y = fmaf(s, 2.6083159e-6f, -1.9810691e-4f);
  y = fmaf(y, s, 8.3330662e-3f);
  y = fmaf(y, s, -1.6666659e-1f);
  y = fmaf(y * s, r, r);
  return __uint_as_float(__float_as_uint(y) ^ odd << 31);
}
W_FN w_f32 w_mlp_sin(w_f32 x) {
  const w_f32 t = fmaf(x, 0.318309886f, 12582912.0f);
  return w_mlp_sin_of(x, t - 12582912.0f, __float_as_uint(t));
}
W_FN w_f32 w_mlp_cos(w_f32 x) {  // sin(x - (k - 1/2) pi), turned for odd k
  const w_f32 t = fmaf(x, 0.318309886f, 0.5f) + 12582912.0f;
  const w_f32 k = t - 12582912.0f;
  return w_mlp_sin_of(x, k - 0.5f, __float_as_uint(t));
}
