// What the tensor-core templates need of the machine besides weft_cuda_machine.h: asynchronous copies, matrix fragments,
// split sums. Includes nothing. Tests put an emulation in its place.
typedef unsigned int u32;
typedef unsigned short u16;
W_FN u32 w_shared(const void* p) {
  u32 r;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(r) : "l"(p));
  return r;
}
// `bytes` of the 16 are read, the rest is zero
W_FN void w_copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
W_FN void w_copy16(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// what lies there, or zeros where it is outside: reads in the order of the text, none waits for another
W_FN void w_read_if(uint4& v, const void* p, bool in) {
  asm volatile("{ .reg .pred q; setp.ne.u32 q, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
               " @q ld.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((u32)in));
}
W_FN void w_read_if(uint2& v, const void* p, bool in) {
  asm volatile("{ .reg .pred q; setp.ne.u32 q, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; @q ld.global.v2.b32 {%0, %1}, [%2]; }"
               : "=&r"(v.x), "=&r"(v.y) : "l"(p), "r"((u32)in));
}
W_FN void w_read_if(u32& v, const void* p, bool in) {
  asm volatile("{ .reg .pred q; setp.ne.u32 q, %2, 0; mov.b32 %0, 0; @q ld.global.b32 %0, [%1]; }"
               : "=&r"(v) : "l"(p), "r"((u32)in));
}
W_FN void w_read_if(u16& v, const void* p, bool in) {
  asm volatile("{ .reg .pred q; setp.ne.u32 q, %2, 0; mov.b16 %0, 0; @q ld.global.b16 %0, [%1]; }"
               : "=&h"(v) : "l"(p), "r"((u32)in));
}
// all lanes: what stands before it is not put off behind it
W_FN void w_together() { __syncwarp(); }
W_FN void w_prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
W_FN void w_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> W_FN void w_arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
W_FN void w_store16(u32 to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
W_FN void w_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
W_FN void w_matrices_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
W_FN void w_mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
W_FN void w_mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
W_FN float2 w_unpack_f16(u32 x) {  // the two halves of a word, low half first
  float2 r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(r.x), "=f"(r.y) : "r"(x));
  return r;
}
W_FN float2 w_unpack_bf16(u32 x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
// partial sums of other blocks: past the first-level cache, which is not coherent
W_FN float4 w_read_partial(const float4* p) { return __ldcg(p); }
W_FN float w_read_partial(const float* p) { return __ldcg(p); }
// shared memory of another block of the cluster
W_FN float4 w_read_cluster(u32 at, u32 rank) {
  float4 v = make_float4(0, 0, 0, 0);
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %4, %5;\n"
               " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a]; }"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at), "r"(rank) : "memory");
#endif
  return v;
}
// to be sure that no other block of the cluster reads from here any more; publishes nothing
W_FN void w_cluster_leave() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// warpgroup products (sm_90a): operands in shared memory, rows of 128 bytes, 128-byte swizzle, tiles aligned to 1024
typedef unsigned long long u64;
W_FN u64 w_descriptor(u32 at) {
  return (u64)((at & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
W_FN void w_async_fence() {  // ordinary stores and copies of this thread become visible to them
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
W_FN void w_group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
W_FN void w_group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> W_FN void w_group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
#endif
