// Stands in for weft_cuda_machine.h on the host: the threads of a block are contexts of one operating-system thread,
// the blocks of a cluster are operating-system threads. A context runs until it waits for others.
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <ucontext.h>
#include <utility>
#include <vector>
using std::memcpy;
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict
#define W_FN inline __attribute__((always_inline))
#define __global__
#define __launch_bounds__(...)
#define W_DYNAMIC_16(name, bytes) alignas(16) W_SHARED unsigned char name[bytes]
#define W_SHARED static thread_local
#define W_TABLE alignas(16) static const
struct Dim { unsigned x, y, z; };
static thread_local Dim threadIdx, blockIdx, gridDim;
static thread_local char base_of_shared;

struct Block;
static thread_local Block* block = nullptr;

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  long waits = 0;       // generation of the barrier that it waits for
  int kind = 0;         // 0 runs, 1 block barrier, 2 warp exchange, 3 cluster barrier, 4 what other blocks write
  long exchanges = 0;
};

struct Cluster {
  std::vector<char*> bases;
  std::barrier<> meet;
  explicit Cluster(int n) : bases(n), meet(n) {}
};

struct Block {
  unsigned threads, rank, number;
  Cluster* cluster;
  std::vector<Thread> fibers;
  ucontext_t home;
  unsigned now = 0;
  bool any[2] = {};
  std::vector<unsigned> words;  // two generations of one word per thread
  void* argument;
  void (*body)(void*);

  static void enter() {
    Block* b = block;
    b->body(b->argument);
    b->fibers[b->now].done = true;
    swapcontext(&b->fibers[b->now].context, &b->home);
  }
  void pause(int kind) {
    unsigned me = now;
    fibers[me].kind = kind;
    swapcontext(&fibers[me].context, &home);
  }
  static void fail(const char* what) {
    std::fprintf(stderr, "emulator: %s\n", what);
    std::abort();
  }
  void run() {
    block = this;
    if (cluster) {
      cluster->bases[rank] = &base_of_shared;
      cluster->meet.arrive_and_wait();
    }
    fibers.resize(threads);
    words.assign(2 * threads, 0);
    for (unsigned t = 0; t < threads; ++t) {
      Thread& f = fibers[t];
      f.stack.reset(new char[1 << 16]);
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get();
      f.context.uc_stack.ss_size = 1 << 16;
      f.context.uc_link = &home;
      makecontext(&f.context, &Block::enter, 0);
    }
    for (;;) {
      bool moved = false, left = false;
      for (unsigned t = 0; t < threads; ++t) {
        if (fibers[t].done) continue;
        left = true;
        if (fibers[t].kind) continue;
        now = t;
        threadIdx.x = t;
        blockIdx.x = number;
        moved = true;
        swapcontext(&home, &fibers[t].context);
      }
      if (!left) break;
      release(moved);
    }
  }
  void release(bool moved) {
    unsigned at_barrier = 0, at_cluster = 0, done = 0;
    for (auto& f : fibers) at_barrier += f.kind == 1, at_cluster += f.kind == 3, done += f.done;
    if (at_barrier == threads || at_cluster == threads) {
      if (at_cluster) cluster->meet.arrive_and_wait();
      for (auto& f : fibers) f.kind = 0;
      moved = true;
    }
    for (unsigned w = 0; w < threads; w += 32) {
      unsigned waiting = 0;
      for (unsigned t = w; t < w + 32; ++t) waiting += fibers[t].kind == 2;
      if (waiting == 32) {
        for (unsigned t = w; t < w + 32; ++t) fibers[t].kind = 0;
        moved = true;
      }
    }
    for (auto& f : fibers) {
      if (f.kind != 4) continue;
      f.kind = 0;
      if (!moved) std::this_thread::yield();
      moved = true;
    }
    if (!moved) fail("threads wait for each other in vain");
  }
};

inline void w_named_barrier(int, int) { Block::fail("named barriers are not emulated"); }
inline void w_named_barrier_arrive(int, int) { Block::fail("named barriers are not emulated"); }
W_FN void w_wait() {}
W_FN void w_release() {}
W_FN void w_fence() {}
inline void __syncthreads() { block->pause(1); }
inline unsigned w_shfl_word(unsigned x, int mask) {
  Block* b = block;
  unsigned me = b->now;
  unsigned* words = b->words.data() + (b->fibers[me].exchanges++ & 1) * b->threads;
  words[me] = x;
  b->pause(2);
  return words[me ^ (unsigned)mask];
}
inline unsigned w_cluster_rank() { return block->rank; }
inline void w_cluster_sync() { block->pause(3); }
inline void w_cluster_arrive() {}
inline void w_cluster_wait() { block->pause(3); }
inline void w_cluster_put(const float* p, unsigned rank, float x) {
  *(volatile float*)((char*)p - &base_of_shared + block->cluster->bases[rank]) = x;
}
inline unsigned w_cluster_word(const unsigned* p, unsigned rank) {
  return *(const volatile unsigned*)((char*)p - &base_of_shared + block->cluster->bases[rank]);
}
inline unsigned w_count(unsigned* counter, unsigned total) {
  unsigned old = __atomic_load_n(counter, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(counter, &old, old + 1u == total ? 0u : old + 1u, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {}
  return old;
}
inline void w_put_pair(unsigned* p, unsigned long long x) { __atomic_store_n((unsigned long long*)p, x, __ATOMIC_RELAXED); }
inline unsigned long long w_take_pair(const unsigned* p) {
  return __atomic_load_n((const unsigned long long*)p, __ATOMIC_RELAXED);
}
inline void w_again() { block->pause(4); }
inline bool w_any_lane(bool x) {
  unsigned any = x;
  for (int o = 1; o < 32; o *= 2) any |= w_shfl_word(any, o);
  return any;
}
inline void w_in_turn() {}
inline unsigned w_opaque(unsigned x) { return x; }
inline void w_least_shared(unsigned* p, unsigned x) { *p = x < *p ? x : *p; }
template <class T> W_FN T w_fresh(const T* p) { return *(const volatile T*)p; }
inline bool w_last_arrival(unsigned* counter, unsigned total) {
  bool last = (*counter)++ == total - 1u;
  if (last) *counter = 0u;
  return last;
}
inline bool w_any_thread(bool x) {
  Block* b = block;
  b->any[0] |= x;
  b->pause(1);
  bool r = b->any[0];
  b->pause(1);
  b->any[0] = false;
  b->pause(1);
  return r;
}
inline float w_max_f32(float a, float b) { return a != a || b != b ? __builtin_nanf("") : a > b ? a : b; }
inline float w_min_f32(float a, float b) { return a != a || b != b ? __builtin_nanf("") : a < b ? a : b; }
inline float w_widen_f16(unsigned short h) {
  _Float16 x;
  memcpy(&x, &h, 2);
  return (float)x;
}
inline unsigned short w_narrow_f16(float x) {
  _Float16 y = (_Float16)x;
  unsigned short h;
  memcpy(&h, &y, 2);
  return h;
}
#define W_EMULATED
inline void w_held(float&) {}
inline unsigned w_times256_f16(unsigned x) {
  return w_narrow_f16(w_widen_f16((unsigned short)x) * 256.0f) |
         (unsigned)w_narrow_f16(w_widen_f16((unsigned short)(x >> 16)) * 256.0f) << 16;
}
inline unsigned w_narrow2_f16(float lo, float hi) { return w_narrow_f16(lo) | (unsigned)w_narrow_f16(hi) << 16; }
inline unsigned short w_narrow_bf16(float x) {
  unsigned b;
  memcpy(&b, &x, 4);
  return (b & 0x7fffffffu) > 0x7f800000u ? b >> 16 | 0x40u : (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
}
inline unsigned w_narrow2_bf16(float lo, float hi) { return w_narrow_bf16(lo) | (unsigned)w_narrow_bf16(hi) << 16; }

template <class... A, std::size_t... I>
void call_with(void (*f)(A...), void* const* arguments, std::index_sequence<I...>) { f((A)arguments[I]...); }

// One launch: `exchanges` says whether threads wait for each other (else they simply run one after the other), `gang` how
// many blocks run at once: whole clusters.
template <class... A>
void emulate(void (*f)(A...), void* const* arguments, unsigned grid, unsigned threads, unsigned cluster, bool exchanges,
             unsigned gang) {
  auto body = [=] { call_with(f, arguments, std::index_sequence_for<A...>{}); };
  typedef decltype(body) Body;
  auto enter = [](void* p) { (*(const Body*)p)(); };
  if (!exchanges) {
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) body();
    return;
  }
  for (unsigned first = 0; first < grid; first += gang) {
    Cluster together((int)cluster);
    std::vector<std::thread> blocks;
    for (unsigned r = 0; r < gang; ++r) {
      auto one = [&, r] {
        Block b{};
        b.threads = threads, b.rank = r, b.number = first + r;
        b.cluster = cluster > 1 ? &together : nullptr;
        b.argument = (void*)&body, b.body = enter;
        b.run();
      };
      if (gang == 1) one();
      else blocks.emplace_back(one);
    }
    for (auto& t : blocks) t.join();
  }
}
