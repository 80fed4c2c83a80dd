// Boxes and bytes that the L2 cache is to have soon: hints, which no order binds. Includes nothing. Tests put an
// emulation in its place.
#ifndef W_EMULATED
#define W_TMA_ASK(N) "cp.async.bulk.prefetch.tensor." #N "d.L2.global.tile [%0, "
W_FN void w_tma_ask(const w_map* m, int x, int y) {
  asm volatile(W_TMA_ASK(2) "{%1, %2}];" ::"l"(m), "r"(x), "r"(y) : "memory");
}
W_FN void w_tma_ask(const w_map* m, int x, int y, int z) {
  asm volatile(W_TMA_ASK(3) "{%1, %2, %3}];" ::"l"(m), "r"(x), "r"(y), "r"(z) : "memory");
}
W_FN void w_tma_ask(const w_map* m, int x, int y, int z, int u) {
  asm volatile(W_TMA_ASK(4) "{%1, %2, %3, %4}];" ::"l"(m), "r"(x), "r"(y), "r"(z), "r"(u) : "memory");
}
W_FN void w_tma_ask(const w_map* m, int x, int y, int z, int u, int v) {
  asm volatile(W_TMA_ASK(5) "{%1, %2, %3, %4, %5}];"
               ::"l"(m), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v) : "memory");
}
W_FN void w_bulk_ask(const void* from, u32 bytes) {  // a multiple of 16
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
#endif
