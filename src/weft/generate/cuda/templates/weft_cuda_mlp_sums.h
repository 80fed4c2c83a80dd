// The start of sums from shared memory, and GELU in the scale in which its tanh has a cubic without a factor.
// Includes nothing; stands behind weft_cuda_mlp.h.
#ifdef W_EMULATED
W_FN void w_sums4(float& a, float& b, float& c, float& d, const unsigned char* sm, u32 at, u32) {
  const float* v = (const float*)(sm + at);
  a = v[0]; b = v[1]; c = v[2]; d = v[3];
}
#else
// four neighbours to where they are needed, not before `behind` is there
W_FN void w_sums4(float& a, float& b, float& c, float& d, const unsigned char* sm, u32 at, u32 behind) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(w_shared(sm) + at), "r"(behind));
}
#endif
// y + y tanh(y (y^2 + 2.4532)): 2 s times GELU of y / s, with s = 0.4613 times the factor of erf's argument
W_FN w_f32 w_mlp_gelu_stretched(w_f32 y) { return fmaf(y, w_mlp_tanh_bf16(y * fmaf(y, y, W_STRETCHED)), y); }
