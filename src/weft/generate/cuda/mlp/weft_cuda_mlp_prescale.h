// Loads and stores with hints, and GELU in the scale in which its tanh has a cubic without a factor.
// Includes nothing; stands behind weft_cuda_mlp.h.
#ifdef W_EMULATED
W_FN uint4 w_load_once(const void* p) { return *(const uint4*)p; }
W_FN void w_store_kept(void* p, uint4 v) { *(uint4*)p = v; }
#else
// what nobody reads again, and what is to stay in the L2 cache
W_FN uint4 w_load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
W_FN void w_store_kept(void* p, uint4 v) {
  u64 keep;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
               ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(keep) : "memory");
}
#endif
// y + y tanh(y (y^2 + 2.4532)): 2 s times GELU of y / s, with s = 0.4613 times the factor of erf's argument
W_FN w_f32 w_mlp_gelu_stretched(w_f32 y) { return fmaf(y, w_mlp_tanh_bf16(y * fmaf(y, y, W_STRETCHED)), y); }
