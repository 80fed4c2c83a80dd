// The time of the whole GPU, for kernels that record it or keep to it.
#ifdef __CUDA_ARCH__
W_FN unsigned long long w_timer() {  // nanoseconds of the whole GPU, in coarse steps
  unsigned long long x;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(x));
  return x;
}
#endif
