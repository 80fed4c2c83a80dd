// Multicast within a cluster: loads into several CTAs, and arrivals at their barriers. Includes nothing. Tests put an
// emulation in its place.
#ifndef W_EMULATED
W_FN void w_bar_arrive_at(u32 at, u32 rank) {  // the barrier at the same place of a block of the cluster
  asm volatile("{ .reg .b32 r;\n mapa.shared::cluster.u32 r, %0, %1;\n"
               " mbarrier.arrive.shared::cluster.b64 _, [r]; }" ::"r"(at), "r"(rank) : "memory");
}
// as w_tma and w_bulk, to the same place of all blocks of a mask, each of whose barriers counts the bytes
#define W_TMA_SHARED(N) \
  "cp.async.bulk.tensor." #N "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
W_FN void w_tma_shared(const w_map* m, u32 to, u32 bar, u32 mask, int x, int y) {
  asm volatile(W_TMA_SHARED(2) "{%4, %5}], [%2], %3;"
               ::"r"(to), "l"(m), "r"(bar), "h"((u16)mask), "r"(x), "r"(y) : "memory");
}
W_FN void w_tma_shared(const w_map* m, u32 to, u32 bar, u32 mask, int x, int y, int z) {
  asm volatile(W_TMA_SHARED(3) "{%4, %5, %6}], [%2], %3;"
               ::"r"(to), "l"(m), "r"(bar), "h"((u16)mask), "r"(x), "r"(y), "r"(z) : "memory");
}
W_FN void w_tma_shared(const w_map* m, u32 to, u32 bar, u32 mask, int x, int y, int z, int u) {
  asm volatile(W_TMA_SHARED(4) "{%4, %5, %6, %7}], [%2], %3;"
               ::"r"(to), "l"(m), "r"(bar), "h"((u16)mask), "r"(x), "r"(y), "r"(z), "r"(u) : "memory");
}
W_FN void w_tma_shared(const w_map* m, u32 to, u32 bar, u32 mask, int x, int y, int z, int u, int v) {
  asm volatile(W_TMA_SHARED(5) "{%4, %5, %6, %7, %8}], [%2], %3;"
               ::"r"(to), "l"(m), "r"(bar), "h"((u16)mask), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v) : "memory");
}
W_FN void w_bulk_shared(u32 to, const void* from, u32 bytes, u32 bar, u32 mask) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "h"((u16)mask) : "memory");
}
#endif
