// What attention by warpgroups needs of Hopper besides weft_cuda_tma.h. Includes nothing; tests bring their own.
#ifndef W_EMULATED
// what follows reads these registers behind what stands before: products in flight write them
template <int N> W_FN void w_hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
W_FN int w_unknown(int x) {  // to the compiler
  asm volatile("" : "+r"(x));
  return x;
}
W_FN bool w_any_lane(bool x) { return __any_sync(0xffffffffu, x); }
W_FN u32 w_read_acquired(const u32* p) {  // and what was written before it
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
W_FN void w_write_released(u32* p, u32 x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
#endif
