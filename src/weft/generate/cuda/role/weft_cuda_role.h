// Where a role runs. Its text speaks of `role` alone: of its own threads, blocks and barriers, whatever else the kernel
// around it holds. Includes nothing.
// How many threads meet, where that stands in the instruction and not in a register.
template <int N> struct w_threads {
  W_FN operator int() const { return N; }
};
#ifdef __CUDA_ARCH__
#define W_DYNAMIC(name) extern __shared__ __align__(1024) unsigned char name[]
#define W_DYNAMIC_16(name, bytes) extern __shared__ __align__(16) unsigned char name[]
W_FN void w_named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
W_FN void w_named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
template <int N> W_FN void w_named_barrier(int number, w_threads<N>) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(N) : "memory");
}
template <int N> W_FN void w_named_barrier_arrive(int number, w_threads<N>) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(N) : "memory");
}
#endif
// The only role of its kernel: threads, blocks and barriers are the kernel's (barrier 0 is that of all threads).
struct w_solo {
  static W_FN unsigned thread() { return threadIdx.x; }
  static W_FN unsigned block_x() { return blockIdx.x; }
  static W_FN unsigned block_y() { return blockIdx.y; }
  static W_FN unsigned block_z() { return blockIdx.z; }
  static W_FN unsigned blocks_x() { return gridDim.x; }
  static W_FN void sync() { __syncthreads(); }
  static W_FN bool any(bool x) { return w_any_thread(x); }  // of its threads, at a barrier of them
  template <class N> static W_FN void named_barrier(int number, N threads) { w_named_barrier(1 + number, threads); }
  template <class N> static W_FN void named_barrier_arrive(int number, N threads) {
    w_named_barrier_arrive(1 + number, threads);
  }
  // programmatic dependent launch: what earlier kernels wrote is visible; later kernels may start
  static W_FN void pdl_wait() { w_wait(); }
  static W_FN void pdl_trigger() { w_release(); }
};
// One of several roles of a grid, each with blocks of its own: block (x, y, z) of X in the first dimension.
template <unsigned X> struct w_beside : w_solo {
  const unsigned x, y, z;
  W_FN w_beside(unsigned x, unsigned y, unsigned z) : x(x), y(y), z(z) {}
  W_FN unsigned block_x() const { return x; }
  W_FN unsigned block_y() const { return y; }
  W_FN unsigned block_z() const { return z; }
  static W_FN unsigned blocks_x() { return X; }
};
