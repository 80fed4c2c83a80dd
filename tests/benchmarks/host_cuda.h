// Plain CUDA C++ on the host, for one kernel a file: blocks one after another, the threads of a block as contexts that
// run until they wait. A thread that has left counts as there at a barrier, as on a GPU.
#include <cmath>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict
#define __global__ __attribute__((visibility("hidden")))
#define __launch_bounds__(...)
#define __shared__ static
#define __constant__ static

struct dim3 { unsigned x, y, z; };
struct float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static dim3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  int waits = 0;  // 0: runs, 1: at a barrier, 2: at an exchange of its warp
  unsigned exchanges = 0;
};

struct Block {
  unsigned threads;
  bool backwards;
  std::vector<Thread> fibers;
  std::vector<unsigned> words;  // two generations of one word for each thread
  ucontext_t home;
  unsigned now = 0;
  void (*body)(void*);
  void* argument;

  static void enter();
  __attribute__((noinline)) void pause(int kind) {
    const unsigned me = now;
    fibers[me].waits = kind;
    swapcontext(&fibers[me].context, &home);
  }
  void place(unsigned t) {
    now = t;
    threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
  }
  bool run();  // false: threads wait in vain
  bool release();
};
static Block* block = nullptr;

inline void Block::enter() {
  block->body(block->argument);
  block->fibers[block->now].done = true;
  swapcontext(&block->fibers[block->now].context, &block->home);
}
inline bool Block::run() {
  block = this;
  fibers.resize(threads);
  words.assign(2 * threads, 0xDEADBEEFu);
  for (Thread& f : fibers) {
    f.stack.reset(new char[1 << 16]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = 1 << 16;
    f.context.uc_link = &home;
    makecontext(&f.context, &Block::enter, 0);
  }
  for (;;) {
    bool left = false;
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned t = backwards ? threads - 1 - i : i;
      if (fibers[t].done) continue;
      left = true;
      if (fibers[t].waits) continue;
      place(t);
      swapcontext(&home, &fibers[t].context);
    }
    if (!left) return true;
    if (!release()) return false;
  }
}
inline bool Block::release() {
  bool moved = false;
  unsigned alive = 0, at_barrier = 0;
  for (Thread& f : fibers) alive += !f.done, at_barrier += !f.done && f.waits == 1;
  if (at_barrier == alive) {  // or all have left
    for (Thread& f : fibers) f.waits = 0;
    return true;
  }
  for (unsigned w = 0; w < threads; w += 32) {
    unsigned own = 0, there = 0;
    for (unsigned t = w; t < w + 32 && t < threads; ++t) own += !fibers[t].done, there += !fibers[t].done && fibers[t].waits == 2;
    if (!own || own != there) continue;
    for (unsigned t = w; t < w + 32 && t < threads; ++t) fibers[t].waits = 0;
    moved = true;
  }
  for (Thread& f : fibers) moved |= !f.done && !f.waits;
  return moved;
}

inline void __syncthreads() { block->pause(1); }
inline void __threadfence_block() {}
inline void __syncwarp(unsigned = ~0u) { block->pause(2); }
inline unsigned exchanged(unsigned x, unsigned from, unsigned width) {
  Block* b = block;
  const unsigned me = b->now;
  unsigned* words = b->words.data() + (b->fibers[me].exchanges++ & 1) * b->threads;
  words[me] = x;
  b->pause(2);
  return from < width && (me & ~31u) + from < b->threads ? words[(me & ~31u) + from] : x;
}
template <class T> T exchange(T x, unsigned from) {
  static_assert(sizeof(T) % 4 == 0, "words");
  unsigned words[sizeof(T) / 4];
  memcpy(words, &x, sizeof x);
  for (unsigned& w : words) w = exchanged(w, from, 32);
  memcpy(&x, words, sizeof x);
  return x;
}
template <class T> T __shfl_down_sync(unsigned, T x, unsigned by) { return exchange(x, (block->now & 31) + by); }
template <class T> T __shfl_up_sync(unsigned, T x, unsigned by) { return exchange(x, (block->now & 31) - by); }
template <class T> T __shfl_xor_sync(unsigned, T x, unsigned mask) { return exchange(x, (block->now & 31) ^ mask); }
template <class T> T __shfl_sync(unsigned, T x, unsigned from) { return exchange(x, from & 31); }

template <class T> T atomicAdd(T* p, T x) { const T old = *p; *p = old + x; return old; }
template <class T> T atomicMin(T* p, T x) { const T old = *p; *p = x < old ? x : old; return old; }
template <class T> T atomicMax(T* p, T x) { const T old = *p; *p = x > old ? x : old; return old; }
template <class T> T __ldg(const T* p) { return *p; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __saturatef(float x) { return x > 0.0f ? std::fmin(x, 1.0f) : 0.0f; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float normcdff(float x) { return 0.5f * std::erfc(x * -0.70710678118654752f); }
inline void sincospif(float x, float* s, float* c) {
  *s = (float)std::sin(M_PI * (double)x);
  *c = (float)std::cos(M_PI * (double)x);
}
inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned by) {
  return (unsigned)((((unsigned long long)hi << 32) | lo) >> (by & 31));
}
inline unsigned __vsadu4(unsigned a, unsigned b) {
  unsigned sum = 0;
  for (int i = 0; i < 32; i += 8) {
    const int d = (int)(a >> i & 255) - (int)(b >> i & 255);
    sum += d < 0 ? -d : d;
  }
  return sum;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= (unsigned)(both >> (8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
  return r;
}

template <class... A, std::size_t... I>
void call_with(void (*f)(A...), void* const* arguments, std::index_sequence<I...>) { f(*(A*)arguments[I]...); }

// The given blocks in their order, threads of a block forwards or backwards between barriers. 1: threads waited in vain.
template <class... A>
int launched(void (*f)(A...), void* const* arguments, const unsigned* grid, const unsigned* threads, const unsigned* order,
             unsigned blocks, int exchanges, int backwards) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads[0], threads[1], threads[2]};
  auto body = [=] { call_with(f, arguments, std::index_sequence_for<A...>{}); };
  typedef decltype(body) Body;
  const unsigned count = threads[0] * threads[1] * threads[2];
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned n = order[i];
    blockIdx = {n % grid[0], n / grid[0] % grid[1], n / grid[0] / grid[1]};
    Block b{};
    b.threads = count, b.backwards = backwards;
    b.argument = (void*)&body, b.body = [](void* p) { (*(const Body*)p)(); };
    if (exchanges) {
      if (!b.run()) return 1;
      continue;
    }
    for (unsigned t = 0; t < count; ++t) {
      b.place(backwards ? count - 1 - t : t);
      body();
    }
  }
  return 0;
}
