// What the machine gives Weft's generated CUDA kernels: synchronisation, exchange among threads, 16-bit conversions.
// Includes nothing; compiled by NVRTC for sm_80 and newer. Tests put an emulation in its place.
#define W_FN __device__ __forceinline__
#define W_SHARED __shared__
#define W_TABLE __device__ __align__(16) const
#define __builtin_inff() __int_as_float(0x7f800000)
#define __builtin_inf() __longlong_as_double(0x7ff0000000000000LL)
#define __builtin_nanf(_) __int_as_float(0x7fffffff)
#define __builtin_nan(_) __longlong_as_double(0x7fffffffffffffffLL)
// Programmatic dependent launch: wait until what the predecessors wrote is visible; let the successors start.
W_FN void w_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
W_FN void w_release() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
W_FN unsigned w_shfl_word(unsigned x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
W_FN unsigned w_cluster_rank() {
  unsigned r = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
  return r;
}
W_FN void w_cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The word at the same place of another block's shared memory.
W_FN unsigned w_cluster_word(const unsigned* p, unsigned rank) {
  unsigned x = 0;
#if __CUDA_ARCH__ >= 900
  unsigned at = (unsigned)__cvta_generic_to_shared(p), there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(there) : "memory");
#endif
  return x;
}
W_FN void w_fence() { __threadfence(); }
// What other blocks of this launch wrote: past the first-level cache.
template <class T> W_FN T w_fresh(const T* p) { return *(const volatile T*)p; }
// Counts an arrival; true for the last of `total`, which also sets the counter back.
W_FN bool w_last_arrival(unsigned* counter, unsigned total) {
  __threadfence();
  bool last = atomicAdd(counter, 1u) == total - 1u;
  if (last) *counter = 0u;
  __threadfence();
  return last;
}
W_FN bool w_any_thread(bool x) { return __syncthreads_or(x) != 0; }
// The greater and the lesser number; NaN if either is.
W_FN float w_max_f32(float a, float b) {
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
W_FN float w_min_f32(float a, float b) {
  float x;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
W_FN float w_widen_f16(unsigned short h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
W_FN unsigned short w_narrow_f16(float x) {
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
W_FN unsigned w_narrow2_f16(float lo, float hi) {
  unsigned h;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(hi), "f"(lo));
  return h;
}
W_FN unsigned short w_narrow_bf16(float x) {
  unsigned h;  // two at once: alone it may become an instruction of the slow unit that exponentials use
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(0.0f), "f"(x));
  return (unsigned short)h;
}
W_FN unsigned w_narrow2_bf16(float lo, float hi) {
  unsigned h;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(hi), "f"(lo));
  return h;
}
