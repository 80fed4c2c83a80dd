// Fix-up of stream-K: partial sums from CTA to CTA through global memory, a warp to the same warp. Includes nothing.
// Tests put an emulation in its place.
#ifndef W_EMULATED
W_FN void w_raise(unsigned* flag) {  // behind a barrier of the warp: what it has written is there
  asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}
W_FN void w_await(unsigned* flag) {  // until it is raised; lowers it
  unsigned up;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(up) : "l"(flag) : "memory");
  } while (!up);
  *flag = 0;
}
#endif
