// Results that TMA stores from shared memory. Includes nothing. Tests put an emulation in its place.
#ifndef W_EMULATED
// four matrices of 8 x 8 halves, as the lanes hold them, to the rows whose addresses the lanes have, 8 for each
W_FN void w_matrices_store(u32 at, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
#define W_TMA_STORE(N) "cp.async.bulk.tensor." #N "d.global.shared::cta.tile.bulk_group [%0, "
// what lies outside of the tensor is not stored
W_FN void w_tma_store(const w_map* m, u32 from, int x, int y) {
  asm volatile(W_TMA_STORE(2) "{%2, %3}], [%1];" ::"l"(m), "r"(from), "r"(x), "r"(y) : "memory");
}
W_FN void w_tma_store(const w_map* m, u32 from, int x, int y, int z) {
  asm volatile(W_TMA_STORE(3) "{%2, %3, %4}], [%1];" ::"l"(m), "r"(from), "r"(x), "r"(y), "r"(z) : "memory");
}
W_FN void w_tma_store(const w_map* m, u32 from, int x, int y, int z, int u) {
  asm volatile(W_TMA_STORE(4) "{%2, %3, %4, %5}], [%1];"
               ::"l"(m), "r"(from), "r"(x), "r"(y), "r"(z), "r"(u) : "memory");
}
W_FN void w_tma_store(const w_map* m, u32 from, int x, int y, int z, int u, int v) {
  asm volatile(W_TMA_STORE(5) "{%2, %3, %4, %5, %6}], [%1];"
               ::"l"(m), "r"(from), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v) : "memory");
}
W_FN void w_stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// until shared memory of all but so many groups has been read
template <int N> W_FN void w_stores_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
W_FN void w_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }  // and is in memory
#endif
