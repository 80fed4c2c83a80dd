// Stands in for weft_cuda_machine.h and weft_cuda_tensor.h on the host: the threads of a cluster are fibers, matrix
// fragments and asynchronous copies have the meaning of the PTX manual. Copies are checked against the buffers that the
// test registers; by W_DEFER they arrive at once or as late as the kernel's own waits allow.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <deque>
#include <functional>
#include <utility>
#include <vector>
#define W_EMULATED
#define W_FN inline __attribute__((always_inline))
#define __device__
#define __global__
#define __constant__
#define __shared__ static  // one block at a time: clusters use dynamic shared memory only
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
typedef unsigned int u32;
typedef unsigned short u16;
struct dim3 { unsigned x, y, z; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned __float_as_uint(float x) { unsigned r; memcpy(&r, &x, 4); return r; }
inline float __uint_as_float(unsigned x) { float r; memcpy(&r, &x, 4); return r; }

struct Barrier { unsigned total = 0, count = 0, generation = 0; };
struct Warp {
  Barrier bar, few[32];
  float fa[2][32][8], fb[2][32][4];
  u32 at[2][32];
  float value[2][32], shared[2][32];
};
struct Copy { u32 to; const void* from; u32 bytes; };
struct Block;
typedef unsigned long long u64;
struct Product { float* d; int half; u64 a, b; int add; float2 (*unpack)(u32); void (*how)(const Product&) = nullptr; };
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  dim3 index;
  Block* block;
  Warp* warp;
  unsigned lane;
  bool done = false;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
  std::deque<std::vector<Product>> products;
  std::vector<Product> issued;
};
struct Block {
  dim3 index;
  unsigned rank;
  std::vector<unsigned char> raw;
  unsigned char* shared;
  unsigned shared_bytes;
  Barrier bar, order[16];
  int any[2] = {0, 0};
  std::vector<Warp> warps;
  std::vector<Thread> threads;
};
static Thread* w_self;
static ucontext_t w_main;
static std::vector<Block>* w_cluster;
static Barrier w_cluster_barrier;
static unsigned long w_progress;
static int w_defer;
static std::function<void()> w_begin;  // before each cluster
static int w_order;  // 0: all threads in turn; 1, 2: the first or the last warp as far ahead of the others as it can be
                     // 3: warps in a random order, some of them not (`w_chance`)
static std::function<unsigned()> w_chance;
static unsigned long w_most_rounds;  // in which all threads have a turn; 0: any number
static dim3 w_grid;
static char w_error[256];
static std::vector<std::pair<const char*, const char*>> w_buffers;
#define threadIdx (w_self->index)
#define blockIdx (w_self->block->index)
#define gridDim w_grid
#define W_DYNAMIC(name) unsigned char* const name = w_self->block->shared

inline void w_fail(const char* what) {
  snprintf(w_error, sizeof w_error, "%s (block %u %u %u, thread %u)", what, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
  for (;;) swapcontext(&w_self->context, &w_main);  // the launch ends here
}
inline void w_yield() { swapcontext(&w_self->context, &w_main); }
inline unsigned w_meet(Barrier& b) {
  const unsigned mine = b.generation;
  ++w_progress;
  if (++b.count == b.total) { b.count = 0; ++b.generation; } else { while (b.generation == mine) w_yield(); }
  return mine & 1;
}
inline void __syncthreads() { w_meet(w_self->block->bar); }
inline void __syncwarp() { w_meet(w_self->warp->bar); }
inline void w_fence() {}
template <class T> inline T w_fresh(const T* p) { return *p; }
inline float w_max_f32(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
inline float w_min_f32(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
inline bool w_any_thread(bool x) {
  Block& b = *w_self->block;
  const unsigned slot = b.bar.generation & 1;
  b.any[slot] |= x;
  w_meet(b.bar);
  const bool r = b.any[slot];
  w_meet(b.bar);
  b.any[slot] = 0;
  return r;
}
inline void w_wait() {}
inline void w_release() {}
inline unsigned w_shfl_word(unsigned x, int mask) {
  Warp& w = *w_self->warp;
  const unsigned slot = w.bar.generation & 1;
  w.at[slot][w_self->lane] = x;
  w_meet(w.bar);
  return w.at[slot][w_self->lane ^ mask];
}
inline float w_few(float x, int bit, int count, int lane) {  // the other lanes of the warp may be elsewhere
  Warp& w = *w_self->warp;
  Barrier& few = w.few[lane & -count];
  few.total = count;
  const unsigned slot = few.generation & 1;
  w.shared[slot][lane] = x;
  w_meet(few);
  return w.shared[slot][lane ^ bit];
}
inline unsigned w_cluster_rank() { return w_self->block->rank; }
inline void w_cluster_leave() { w_meet(w_cluster_barrier); }
inline void w_cluster_sync() { w_meet(w_cluster_barrier); }
inline void w_cluster_arrive() {}
inline void w_cluster_wait() { w_meet(w_cluster_barrier); }
// The same place of another block's shared memory.
static std::function<unsigned char*(const void*, unsigned)> w_there = [](const void* p, unsigned rank) {
  return (*w_cluster)[rank].shared + ((const unsigned char*)p - w_self->block->shared);
};
inline unsigned w_cluster_word(const unsigned* p, unsigned rank) { return *(const unsigned*)w_there(p, rank); }
inline void w_cluster_put(const float* p, unsigned rank, float x) { *(float*)w_there(p, rank) = x; }
inline bool w_last_arrival(unsigned* counter, unsigned total) {
  const bool last = (*counter)++ == total - 1;
  if (last) *counter = 0;
  return last;
}
inline float w_widen_f16(unsigned short h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
inline unsigned short w_narrow_f16(float x) { _Float16 h = (_Float16)x; unsigned short r; memcpy(&r, &h, 2); return r; }
inline unsigned short w_narrow_bf16(float x) {
  unsigned b = __float_as_uint(x);
  return x != x ? 0x7fff : (unsigned short)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
inline void w_held(float&) {}
inline unsigned w_times256_f16(unsigned x) {
  return w_narrow_f16(w_widen_f16((unsigned short)x) * 256.0f) |
         (unsigned)w_narrow_f16(w_widen_f16((unsigned short)(x >> 16)) * 256.0f) << 16;
}
inline unsigned w_narrow2_f16(float lo, float hi) { return w_narrow_f16(lo) | (unsigned)w_narrow_f16(hi) << 16; }
inline unsigned w_narrow2_bf16(float lo, float hi) { return w_narrow_bf16(lo) | (unsigned)w_narrow_bf16(hi) << 16; }
inline float2 w_unpack_f16(u32 x) { return {w_widen_f16((u16)x), w_widen_f16((u16)(x >> 16))}; }
inline float2 w_unpack_bf16(u32 x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }

inline u32 w_shared(const void* p) { return (u32)((const unsigned char*)p - w_self->block->shared); }
inline unsigned char* w_at(u32 at) {
  if (at % 16 || at + 16 > w_self->block->shared_bytes) w_fail("shared memory out of bounds or misaligned");
  return w_self->block->shared + at;
}
inline void w_do(const Copy& c) {
  unsigned char* to = w_at(c.to);
  memset(to, 0, 16);
  memcpy(to, c.from, c.bytes);
}
inline void w_copy16(u32 to, const void* from, u32 bytes) {
  w_at(to);
  if ((size_t)from % 16 || bytes > 16) w_fail("misaligned copy");
  bool known = bytes == 0;
  for (auto& b : w_buffers) known |= (const char*)from >= b.first && (const char*)from + bytes <= b.second;
  if (!known) w_fail("copy from outside of every buffer");
  const Copy c{to, from, bytes};
  if (w_defer) w_self->open.push_back(c); else w_do(c);
}
inline void w_copy16(u32 to, const void* from) { w_copy16(to, from, 16); }
template <class T> inline void w_read_if(T& v, const void* p, bool in) {
  v = T();
  if (in) memcpy(&v, p, sizeof(T));
}
inline void w_together() { __syncwarp(); }
inline void w_prefetch(const void* p) {
  bool known = false;
  for (auto& b : w_buffers) known |= (const char*)p >= b.first && (const char*)p < b.second;
  if (!known) w_fail("prefetch from outside of every buffer");
}
inline void w_commit() { w_self->groups.push_back(std::move(w_self->open)); w_self->open.clear(); }
template <int N> inline void w_arrived() {
  while (w_self->groups.size() > N) {
    for (const Copy& c : w_self->groups.front()) w_do(c);
    w_self->groups.pop_front();
  }
}
inline void w_store16(u32 to, uint4 v) { memcpy(w_at(to), &v, 16); }
inline void w_store_if(void* p, uint4 v, bool in) {
  if (in) memcpy(p, &v, 16);
}
inline void w_fragments(u32 (&r)[4], u32 at, bool transposed) {
  Warp& w = *w_self->warp;
  const unsigned slot = w.bar.generation & 1, lane = w_self->lane;
  w.at[slot][lane] = at;
  w_meet(w.bar);
  for (unsigned i = 0; i < 4; ++i) {
    u16 lo, hi;
    for (unsigned h = 0; h < 2; ++h) {
      const unsigned row = transposed ? 2 * (lane & 3) + h : lane >> 2, col = transposed ? lane >> 2 : 2 * (lane & 3) + h;
      memcpy(h ? &hi : &lo, w_at(w.at[slot][8 * i + row]) + 2 * col, 2);
    }
    r[i] = lo | (u32)hi << 16;
  }
}
inline void w_matrices(u32 (&r)[4], u32 at) { w_fragments(r, at, false); }
inline void w_matrices_transposed(u32 (&r)[4], u32 at) { w_fragments(r, at, true); }
template <class U> inline void w_mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, U unpack) {
  Warp& w = *w_self->warp;
  const unsigned slot = w.bar.generation & 1, lane = w_self->lane;
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack(a[i]);
    w.fa[slot][lane][2 * i] = v.x, w.fa[slot][lane][2 * i + 1] = v.y;
  }
  const float2 v0 = unpack(b0), v1 = unpack(b1);
  float* fb = w.fb[slot][lane];
  fb[0] = v0.x, fb[1] = v0.y, fb[2] = v1.x, fb[3] = v1.y;
  w_meet(w.bar);
  for (int e = 0; e < 4; ++e) {
    const int row = (lane >> 2) + 8 * (e >> 1), col = 2 * (lane & 3) + (e & 1);
    float sum = d[e];
    for (int k = 0; k < 16; ++k) {
      const float x = w.fa[slot][(row & 7) * 4 + (k & 7) / 2][2 * ((row >> 3) + 2 * (k >> 3)) + (k & 1)];
      const float y = w.fb[slot][col * 4 + (k & 7) / 2][2 * (k >> 3) + (k & 1)];
      sum += x * y;
    }
    d[e] = sum;
  }
}
inline void w_mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { w_mma(d, a, b0, b1, w_unpack_f16); }
inline void w_mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { w_mma(d, a, b0, b1, w_unpack_bf16); }
inline u32 w_tf32(float x) {  // to nearest, ties away from zero
  const u32 b = __float_as_uint(x);
  return (b & 0x7f800000) == 0x7f800000 ? b : (b + 0x1000) & 0xffffe000;
}
inline float w_cut_tf32(u32 b) { return __uint_as_float(b & 0xffffe000); }
inline void w_mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Warp& w = *w_self->warp;
  const unsigned slot = w.bar.generation & 1, lane = w_self->lane;
  for (int i = 0; i < 4; ++i) w.fa[slot][lane][i] = w_cut_tf32(a[i]);
  w.fb[slot][lane][0] = w_cut_tf32(b0), w.fb[slot][lane][1] = w_cut_tf32(b1);
  w_meet(w.bar);
  for (int e = 0; e < 4; ++e) {
    const int row = (lane >> 2) + 8 * (e >> 1), col = 2 * (lane & 3) + (e & 1);
    for (int k = 0; k < 8; ++k)
      d[e] += w.fa[slot][(row & 7) * 4 + (k & 3)][(row >> 3) + 2 * (k >> 2)] * w.fb[slot][col * 4 + (k & 3)][k >> 2];
  }
}
template <class A, class B> inline void w_mma_bytes(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Warp& w = *w_self->warp;
  const unsigned slot = w.bar.generation & 1, lane = w_self->lane;
  for (int i = 0; i < 4; ++i) w.fa[slot][lane][i] = __uint_as_float(a[i]);
  w.fb[slot][lane][0] = __uint_as_float(b0), w.fb[slot][lane][1] = __uint_as_float(b1);
  w_meet(w.bar);
  for (int e = 0; e < 4; ++e) {
    const int row = (lane >> 2) + 8 * (e >> 1), col = 2 * (lane & 3) + (e & 1);
    int sum = (int)__float_as_uint(d[e]);
    for (int k = 0; k < 32; ++k) {
      const u32 x = __float_as_uint(w.fa[slot][(row & 7) * 4 + (k & 15) / 4][(row >> 3) + 2 * (k >> 4)]);
      const u32 y = __float_as_uint(w.fb[slot][col * 4 + (k & 15) / 4][k >> 4]);
      sum += (int)(A)(x >> 8 * (k & 3)) * (int)(B)(y >> 8 * (k & 3));
    }
    d[e] = __uint_as_float((u32)sum);
  }
}
#define W_MMA_BYTES(N, A, B) \
  inline void w_mma_##N(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { w_mma_bytes<A, B>(d, a, b0, b1); }
W_MMA_BYTES(s8s8, signed char, signed char) W_MMA_BYTES(u8s8, unsigned char, signed char)
W_MMA_BYTES(s8u8, signed char, unsigned char) W_MMA_BYTES(u8u8, unsigned char, unsigned char)
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline float __int_as_float(int x) { return __uint_as_float((u32)x); }
inline u64 w_descriptor(u32 at) {
  if (at % 32 || at >= w_self->block->shared_bytes) w_fail("operand of a warpgroup product");
  return at;
}
inline float w_operand(u64 at, int row, int k, float2 (*unpack)(u32)) {
  const u32 line = (u32)at + row / 8 * 1024 + row % 8 * 128 + k * 2, place = line ^ (((line >> 7) & 7) << 4);
  if (place + 2 > w_self->block->shared_bytes) w_fail("warpgroup product beyond shared memory");
  u16 x;
  memcpy(&x, w_self->block->shared + place, 2);
  return unpack(x).x;
}
inline void w_do(const Product& p) {
  if (p.how) return p.how(p);
  const int lane = w_self->lane, warp = w_self->index.x / 32 % 4;
  for (int j = 0; j < p.half; ++j) {
    const int row = warp * 16 + lane / 4 + (j / 2 % 2) * 8, col = j / 4 * 8 + lane % 4 * 2 + j % 2;
    float sum = p.add ? p.d[j] : 0.0f;
    for (int k = 0; k < 16; ++k) sum += w_operand(p.a, row, k, p.unpack) * w_operand(p.b, col, k, p.unpack);
    p.d[j] = sum;
  }
}
inline void w_async_fence() {}
inline void w_group_begin() {}
inline void w_group_commit() { w_self->products.push_back(std::move(w_self->issued)); w_self->issued.clear(); }
template <int N> inline void w_group_wait() {
  while (w_self->products.size() > N) {
    for (const Product& p : w_self->products.front()) w_do(p);
    w_self->products.pop_front();
  }
}
template <int H> inline void w_wgmma_f16(float (&d)[H], u64 a, u64 b, int add) {
  const Product p{d, H, a, b, add, w_unpack_f16};
  if (w_defer) w_self->issued.push_back(p); else w_do(p);
}
template <int H> inline void w_wgmma_bf16(float (&d)[H], u64 a, u64 b, int add) {
  const Product p{d, H, a, b, add, w_unpack_bf16};
  if (w_defer) w_self->issued.push_back(p); else w_do(p);
}
// the left operand in registers: of the 16 rows of its warp
template <int H> inline void w_wgmma_rs(float (&d)[H], const u32 (&a)[4], u64 b, int add, float2 (*unpack)(u32)) {
  Warp& w = *w_self->warp;
  const unsigned slot = w.bar.generation & 1, lane = w_self->lane;
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack(a[i]);
    w.fa[slot][lane][2 * i] = v.x, w.fa[slot][lane][2 * i + 1] = v.y;
  }
  w_meet(w.bar);
  for (int j = 0; j < H; ++j) {
    const int row = lane / 4 + (j / 2 % 2) * 8, col = j / 4 * 8 + lane % 4 * 2 + j % 2;
    float sum = add ? d[j] : 0.0f;
    for (int k = 0; k < 16; ++k)
      sum += w.fa[slot][(row & 7) * 4 + (k & 7) / 2][2 * ((row >> 3) + 2 * (k >> 3)) + (k & 1)] * w_operand(b, col, k, unpack);
    d[j] = sum;
  }
}
template <int H> inline void w_wgmma_f16(float (&d)[H], const u32 (&a)[4], u64 b, int add) {
  w_wgmma_rs(d, a, b, add, w_unpack_f16);
}
template <int H> inline void w_wgmma_bf16(float (&d)[H], const u32 (&a)[4], u64 b, int add) {
  w_wgmma_rs(d, a, b, add, w_unpack_bf16);
}
inline float4 w_read_partial(const float4* p) { return *p; }
inline float w_read_partial(const float* p) { return *p; }
inline float4 w_read_cluster(u32 at, u32 rank) {
  w_at(at);
  return *(const float4*)((*w_cluster)[rank].shared + at);
}

static std::function<void()> w_kernel;
static void w_enter() {
  w_kernel();
  w_self->done = true;
  ++w_progress;
#ifdef W_FUSED
  Barrier& all = w_self->block->bar;  // threads that ended are not waited for
  if (--all.total == all.count && all.count) { all.count = 0; ++all.generation; }
#endif
  swapcontext(&w_self->context, &w_main);
}
inline void w_run(std::function<void()> kernel, dim3 grid, dim3 block, unsigned shared, dim3 cluster, int defer) {
  w_kernel = kernel;
  w_grid = grid;
  w_defer = defer;
  *w_error = 0;
  const unsigned count = cluster.x * cluster.y * cluster.z;
  std::vector<Block> blocks(count);
  w_cluster = &blocks;
  for (Block& b : blocks) {
    b.raw.resize(shared + 1024);
    b.shared = b.raw.data() + (1024 - (size_t)b.raw.data() % 1024);
    b.shared_bytes = shared;
    b.warps = std::vector<Warp>((block.x + 31) / 32);
    b.threads = std::vector<Thread>(block.x);
    for (Thread& t : b.threads) t.stack.resize(1 << 17);
  }
  for (unsigned z = 0; z < grid.z; z += cluster.z)
    for (unsigned y = 0; y < grid.y; y += cluster.y)
      for (unsigned x = 0; x < grid.x; x += cluster.x) {
        w_cluster_barrier = Barrier{count * block.x, 0, 0};
        if (w_begin) w_begin();
        unsigned rank = 0;
        for (Block& b : blocks) {
          b.index = {x + rank % cluster.x, y + rank / cluster.x % cluster.y, z + rank / (cluster.x * cluster.y)};
          b.rank = rank++;
          memset(b.raw.data(), 0xff, b.raw.size());
          b.bar = Barrier{block.x, 0, 0};
          for (unsigned i = 0; i < block.x; ++i) {
            Thread& t = b.threads[i];
            t.index = {i, 0, 0};
            t.block = &b;
            t.warp = &b.warps[i / 32];
            t.lane = i % 32;
            t.done = false;
            t.groups.clear();
            t.open.clear();
            t.products.clear();
            t.issued.clear();
            t.warp->bar = Barrier{block.x - i / 32 * 32 < 32 ? block.x - i / 32 * 32 : 32, 0, 0};
            getcontext(&t.context);
            t.context.uc_stack.ss_sp = t.stack.data();
            t.context.uc_stack.ss_size = t.stack.size();
            t.context.uc_link = &w_main;
            makecontext(&t.context, w_enter, 0);
          }
        }
        unsigned stalled = 0;  // rounds in which nothing moved
        unsigned long rounds = 0;
        for (bool alive = true; alive;) {
          alive = false;
          if (w_most_rounds && ++rounds > w_most_rounds) {
            snprintf(w_error, sizeof w_error, "it does not end");
            return;
          }
          const unsigned long before = w_progress;
          const unsigned lanes = w_order ? 32 : block.x, parts = (block.x + lanes - 1) / lanes;
          std::vector<unsigned> order(count * parts);
          for (unsigned k = 0; k < count * parts; ++k) order[k] = w_order == 2 ? count * parts - 1 - k : k;
          if (w_order == 3)
            for (unsigned k = count * parts; k > 1; --k) std::swap(order[k - 1], order[w_chance() % k]);
          for (unsigned k = 0; k < count * parts; ++k) {
            const unsigned p = order[k];
            if (w_order == 3 && !stalled && w_chance() % 2) { alive = true; continue; }
            for (bool moved = true; moved;) {  // in order, a warp goes as far as it can
              const unsigned long there = w_progress;
              for (unsigned i = p % parts * lanes; i < block.x && i < (p % parts + 1) * lanes; ++i) {
                Thread& t = blocks[p / parts].threads[i];
                if (t.done) continue;
                alive = true;
                w_self = &t;
                swapcontext(&w_main, &t.context);
                if (*w_error) return;
              }
              moved = (w_order == 1 || w_order == 2) && w_progress != there;
            }
          }
          const bool again = alive && w_progress == before && w_order == 3 && stalled < 40;
          stalled = alive && w_progress == before ? stalled + 1 : 0;
          if (alive && w_progress == before && !again) {
            snprintf(w_error, sizeof w_error, "threads wait for each other forever");
            return;
          }
        }
      }
}
