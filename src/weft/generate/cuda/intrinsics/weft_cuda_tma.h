// What the tma template needs of Hopper: TMA, barriers that count its bytes, descriptors of operands.
// Includes nothing. Tests put an emulation in its place.
#ifndef W_EMULATED
struct __align__(64) w_map { u64 o[16]; };  // CUtensorMap
W_FN void w_bar_init(u32 at, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
W_FN void w_bar_ready() {  // before a block-wide barrier: TMA sees the barriers initialised
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
W_FN void w_bar_expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
W_FN void w_bar_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
W_FN void w_bar_wait(u32 at, u32 parity) {  // until the phase of that parity is complete
  u32 done;
  do {
    asm volatile("{ .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(at), "r"(parity) : "memory");
  } while (!done);
}
// registers of the calling warpgroup, per thread
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int N> W_FN void w_fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> W_FN void w_more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
#endif
W_FN void w_map_prefetch(const w_map* m) { asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory"); }
// boxes of a tensor into shared memory; what lies outside of the tensor arrives as zero
#define W_TMA(N) "cp.async.bulk.tensor." #N "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
W_FN void w_tma(const w_map* m, u32 to, u32 bar, int x, int y) {
  asm volatile(W_TMA(2) "{%3, %4}], [%2];" ::"r"(to), "l"(m), "r"(bar), "r"(x), "r"(y) : "memory");
}
W_FN void w_tma(const w_map* m, u32 to, u32 bar, int x, int y, int z) {
  asm volatile(W_TMA(3) "{%3, %4, %5}], [%2];" ::"r"(to), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z) : "memory");
}
W_FN void w_tma(const w_map* m, u32 to, u32 bar, int x, int y, int z, int u) {
  asm volatile(W_TMA(4) "{%3, %4, %5, %6}], [%2];"
               ::"r"(to), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(u) : "memory");
}
W_FN void w_tma(const w_map* m, u32 to, u32 bar, int x, int y, int z, int u, int v) {
  asm volatile(W_TMA(5) "{%3, %4, %5, %6, %7}], [%2];"
               ::"r"(to), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v) : "memory");
}
// neighbouring bytes into shared memory; addresses and size are multiples of 16
W_FN void w_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
#endif
// an operand of a warpgroup product; mode 1, 2, 3: a swizzle of 128, 64, 32 bytes
W_FN u64 w_operand_at(u32 at, u32 leading, u32 stride, u32 mode) {
  return (u64)((at & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)mode << 62;
}
// Each of four neighbouring lanes holds a pair of every chunk of 8 columns; afterwards lane q holds all of chunk q.
W_FN void w_quad(float (&v)[8], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (!(c & bit)) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int low = 2 * c + e, high = 2 * (c + bit) + e;
          const bool upper = lane & bit;
          const float got = __uint_as_float(w_shfl_word(__float_as_uint(upper ? v[low] : v[high]), bit));
          if (upper) v[low] = got; else v[high] = got;
        }
      }
}
