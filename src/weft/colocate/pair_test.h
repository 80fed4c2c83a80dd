// Runs a fused kernel on an NVIDIA GPU: checks its results against those of its kernels one after the other, and times
// it beside these two peers: one after the other, and on two streams of different priority. Stands behind the tables of one pair; needs the CUDA driver at run time and nothing of CUDA to be compiled.
//   g++ -std=c++17 -O2 test.cpp -o test -ldl && ./test
// Exit codes: 0 right, 1 wrong results, 2 an error of CUDA or a file, 3 the watchdog ended it.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <unistd.h>
#include <vector>

typedef unsigned long long u64;
// as cuda.h has them, of a launch in clusters
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char whole[64];
    unsigned cluster[3];
  };
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56, "as the driver has them");
enum { CLUSTER_DIMENSION = 4, NON_BLOCKING = 1 };
struct Driver {
  int (*init)(unsigned);
  int (*device)(int*, int);
  int (*attribute)(int*, int, int);
  int (*retain)(void**, int);
  int (*current)(void*);
  int (*load)(void**, const char*);
  int (*function)(void**, void*, const char*);
  int (*global)(u64*, size_t*, void*, const char*);
  int (*allocate)(u64*, size_t);
  int (*to_device)(u64, const void*, size_t);
  int (*to_host)(void*, u64, size_t);
  int (*set)(void*, int, int);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*launch_in_clusters)(const LaunchConfig*, void*, void**, void**);
  int (*wait)();
  int (*priorities)(int*, int*);
  int (*stream)(void**, unsigned, int);
  int (*follow)(void*, void*, unsigned);
  int (*event)(void**, unsigned);
  int (*record)(void*, void*);
  int (*elapsed)(float*, void*, void*);
  int (*error)(int, const char**);
  int (*map)(void*, int, unsigned, void*, const u64*, const u64*, const unsigned*, const unsigned*, int, int, int, int);
} cu;

static void check(int status, const char* what) {
  if (!status) return;
  const char* name = "unknown";
  if (cu.error) cu.error(status, &name);
  std::fprintf(stderr, "%s: %s (%d)\n", what, name, status);
  std::_Exit(2);
}
#define CHECK(call) check(call, #call)

static void open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) {
    std::fprintf(stderr, "no CUDA driver: %s\n", dlerror());
    std::_Exit(2);
  }
  auto get = [&](auto& to, const char* name) {
    void* at = dlsym(library, name);
    if (!at) std::fprintf(stderr, "the CUDA driver has no %s\n", name), std::_Exit(2);
    std::memcpy(&to, &at, sizeof at);
  };
  get(cu.init, "cuInit");
  get(cu.device, "cuDeviceGet");
  get(cu.attribute, "cuDeviceGetAttribute");
  get(cu.retain, "cuDevicePrimaryCtxRetain");
  get(cu.current, "cuCtxSetCurrent");
  get(cu.load, "cuModuleLoad");
  get(cu.function, "cuModuleGetFunction");
  get(cu.global, "cuModuleGetGlobal_v2");
  get(cu.allocate, "cuMemAlloc_v2");
  get(cu.to_device, "cuMemcpyHtoD_v2");
  get(cu.to_host, "cuMemcpyDtoH_v2");
  get(cu.set, "cuFuncSetAttribute");
  get(cu.launch, "cuLaunchKernel");
  const Kernel* const fused = &fused_kernel;
  if (fused->cluster[0] * fused->cluster[1] * fused->cluster[2] > 1) get(cu.launch_in_clusters, "cuLaunchKernelEx");
  get(cu.wait, "cuCtxSynchronize");
  get(cu.priorities, "cuCtxGetStreamPriorityRange");
  get(cu.stream, "cuStreamCreateWithPriority");
  get(cu.follow, "cuStreamWaitEvent");
  get(cu.event, "cuEventCreate");
  get(cu.record, "cuEventRecord");
  get(cu.elapsed, "cuEventElapsedTime");
  get(cu.error, "cuGetErrorName");
  get(cu.map, "cuTensorMapEncodeTiled");
}

// ---- what buffers hold: a number of each element is drawn from its position and the seed alone (SplitMix64)
static u64 mixed(u64 x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}
static double uniform(u64 seed, u64 i) { return (double)(mixed(mixed(seed) + i) >> 11) * 0x1p-53; }
static double drawn(const Buffer& b, u64 i) {
  if (b.init == ARANGE) return (double)i;
  if (b.init == UNIFORM) {
    const double x = b.low + (b.high - b.low) * uniform(b.seed, i);
    return b.scalar[0] == 'f' ? x : std::floor(x);
  }
  // Box and Muller
  return std::sqrt(-2.0 * std::log(1.0 - uniform(b.seed, 2 * i))) * std::cos(6.283185307179586 * uniform(b.seed, 2 * i + 1));
}
template <class T> static void fill(std::vector<unsigned char>& to, const Buffer& b) {
  for (u64 i = 0; i < to.size() / sizeof(T); ++i) {
    const double x = drawn(b, i);
    const T value = b.scalar[0] == 'f' ? (T)x : x < 0 ? (T)(long long)x : (T)(u64)x;
    std::memcpy(&to[i * sizeof(T)], &value, sizeof(T));
  }
}
static unsigned short half_of(double x, bool brain) {  // of what is drawn here: no infinities, no subnormal halves
  const float f = (float)x;
  unsigned u;
  std::memcpy(&u, &f, 4);
  if (brain) return (unsigned short)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
  const int e = (int)(u >> 23 & 255) - 112;
  if (e <= 0) return (unsigned short)(u >> 16 & 0x8000);
  return (unsigned short)((u >> 16 & 0x8000) | (((unsigned)e << 10 | (u >> 13 & 0x3FF)) + (u >> 12 & 1)));
}
static std::vector<unsigned char> contents(const Buffer& b) {
  std::vector<unsigned char> to(b.bytes, b.init == POISON ? 0x5B : 0);
  if (b.init == POISON || b.init == ZEROS) return to;
  if (b.init == FROM_FILE) {
    std::FILE* file = std::fopen(b.file, "rb");
    if (!file || std::fread(to.data(), 1, to.size(), file) != to.size()) {
      std::fprintf(stderr, "%s: cannot be read\n", b.file);
      std::_Exit(2);
    }
    std::fclose(file);
    return to;
  }
  const std::string s = b.scalar;
  if (s == "f4") fill<float>(to, b);
  else if (s == "f8") fill<double>(to, b);
  else if (s == "f2" || s == "bf")
    for (u64 i = 0; i < to.size() / 2; ++i) {
      const unsigned short h = half_of(drawn(b, i), s == "bf");
      std::memcpy(&to[2 * i], &h, 2);
    }
  else if (s == "i1") fill<signed char>(to, b);
  else if (s == "i2") fill<short>(to, b);
  else if (s == "i4") fill<int>(to, b);
  else if (s == "i8") fill<long long>(to, b);
  else if (s == "u2") fill<unsigned short>(to, b);
  else if (s == "u4") fill<unsigned>(to, b);
  else if (s == "u8") fill<u64>(to, b);
  else fill<unsigned char>(to, b);
  return to;
}

// ---- memory: every buffer once for the kernels one after the other and once for the fused one, between guard zones
enum { GUARD = 1024 };
struct Memory {
  std::vector<u64> at;
  std::vector<std::vector<unsigned char>> before;
};
static Memory memory() {
  Memory m;
  for (const Buffer& b : buffers) {
    u64 at = 0;
    CHECK(cu.allocate(&at, b.bytes + 2 * GUARD));
    m.at.push_back(at + GUARD);
    m.before.push_back(contents(b));
  }
  return m;
}
static void reset(const Memory& m) {
  const std::vector<unsigned char> guard(GUARD, 0xA5);
  for (size_t i = 0; i < m.at.size(); ++i) {
    CHECK(cu.to_device(m.at[i] - GUARD, guard.data(), GUARD));
    CHECK(cu.to_device(m.at[i] + buffers[i].bytes, guard.data(), GUARD));
    if (buffers[i].bytes) CHECK(cu.to_device(m.at[i], m.before[i].data(), buffers[i].bytes));
  }
}
static bool guarded(const Memory& m) {
  bool good = true;
  std::vector<unsigned char> zone(GUARD);
  for (size_t i = 0; i < m.at.size(); ++i)
    for (u64 at : {m.at[i] - GUARD, m.at[i] + buffers[i].bytes}) {
      CHECK(cu.to_host(zone.data(), at, GUARD));
      if (std::any_of(zone.begin(), zone.end(), [](unsigned char x) { return x != 0xA5; }))
        std::printf("%s: written beside it\n", buffers[i].name), good = false;
    }
  return good;
}
static std::vector<unsigned char> read(const Memory& m, size_t i) {
  std::vector<unsigned char> got(buffers[i].bytes);
  if (!got.empty()) CHECK(cu.to_host(got.data(), m.at[i], got.size()));
  return got;
}
template <class T> static bool close(const std::vector<unsigned char>& a, const std::vector<unsigned char>& b, double rtol) {
  const size_t n = a.size() / sizeof(T);
  double sum = 0.0;
  std::vector<T> x(n), y(n);
  std::memcpy(x.data(), a.data(), n * sizeof(T));
  std::memcpy(y.data(), b.data(), n * sizeof(T));
  for (T v : y) sum += (double)v * (double)v;
  const double rms = std::sqrt(sum / (double)std::max<size_t>(n, 1));
  for (size_t i = 0; i < n; ++i)
    if (!(std::fabs((double)x[i] - (double)y[i]) <= rtol * (std::fabs((double)y[i]) + rms)) && !(x[i] == y[i])) return false;
  return true;
}
static bool same(const Memory& fused, const Memory& serial) {
  bool good = true;
  for (size_t i = 0; i < fused.at.size(); ++i) {
    const Buffer& b = buffers[i];
    if (b.scratch) continue;
    const std::vector<unsigned char> got = read(fused, i), want = read(serial, i);
    bool right = got == want;
    if (!right && b.rtol > 0.0 && b.scalar[0] == 'f')
      right = b.scalar[1] == '8' ? close<double>(got, want, b.rtol) : b.scalar[1] == '4' && close<float>(got, want, b.rtol);
    size_t first = 0;
    while (!right && first < got.size() && got[first] == want[first]) ++first;
    if (!right) std::printf("%s: differs from byte %zu on\n", b.name, first);
    if (!b.written && got != fused.before[i]) right = false, std::printf("%s: an input was written\n", b.name);
    good &= right;
  }
  return good;
}

// ---- launches
struct Loaded {
  void* function;
  std::vector<std::vector<unsigned char>> words;
  std::vector<void*> places;
  void* raw = nullptr;
};
static void run(const Kernel& k, Loaded& l, void* stream = nullptr) {
  if (k.cluster[0] * k.cluster[1] * k.cluster[2] == 1) {
    CHECK(cu.launch(l.function, k.grid[0], k.grid[1], k.grid[2], k.block[0], k.block[1], k.block[2], k.shared, stream,
                    l.places.data(), nullptr));
    return;
  }
  LaunchAttribute cluster;
  std::memset(&cluster, 0, sizeof cluster);
  cluster.id = CLUSTER_DIMENSION;
  std::memcpy(cluster.cluster, k.cluster, sizeof k.cluster);
  LaunchConfig config;
  std::memset(&config, 0, sizeof config);
  std::memcpy(config.grid, k.grid, sizeof k.grid);
  std::memcpy(config.block, k.block, sizeof k.block);
  config.shared = k.shared, config.stream = stream, config.attributes = &cluster, config.count = 1;
  CHECK(cu.launch_in_clusters(&config, l.function, l.places.data(), nullptr));
}
static Loaded load(const Kernel& k, const Memory& m, u64 counter, const std::string& arch) {
  Loaded l;
  void* module = nullptr;
  const std::string file = std::string(k.file) + "." + arch + ".cubin";
  if (access(file.c_str(), R_OK) != 0) {
    std::fprintf(stderr, "%s: no such file: there is no kernel for this GPU, or this is not its folder\n", file.c_str());
    std::_Exit(2);
  }
  CHECK(cu.load(&module, file.c_str()));
  CHECK(cu.function(&l.function, module, k.entry));
  CHECK(cu.set(l.function, 8, (int)k.shared));  // most dynamic shared memory
  CHECK(cu.set(l.function, 9, 100));            // as much of the SM's as there is: no SM is emptied to change it
  for (int i = 0; i < k.constants; ++i) {
    const Constant& c = constants[k.first_constant + i];
    u64 at = 0;
    size_t size = 0;
    CHECK(cu.global(&at, &size, module, c.symbol));
    const std::vector<unsigned char> data = contents(c.data);
    if (size < data.size()) std::fprintf(stderr, "%s: %zu bytes\n", c.symbol, size), std::_Exit(2);
    CHECK(cu.to_device(at, data.data(), data.size()));
  }
  l.raw = std::aligned_alloc(64, 128 * (size_t)(k.arguments + 1));
  for (int i = 0; i < k.arguments; ++i) {
    const Argument& a = arguments[k.first_argument + i];
    std::vector<unsigned char> word(32, 0);
    if (a.kind == BYTES) std::memcpy(word.data(), a.bytes, 32);
    const u64 address = a.kind == COUNTER ? counter : a.kind == BUFFER || a.kind == MAP ? m.at[a.buffer] + a.offset : 0;
    if (a.kind == BUFFER || a.kind == COUNTER) std::memcpy(word.data(), &address, 8);
    l.words.push_back(word);
    if (a.kind == MAP) {
      const Map& t = maps[a.map];
      void* to = (char*)l.raw + 128 * i;
      CHECK(cu.map(to, t.type, (unsigned)t.rank, (void*)address, t.sizes, t.strides, t.box, t.steps, 0, t.swizzle, 2, 0));
      l.places.push_back(to);
    } else {
      l.places.push_back(nullptr);
    }
  }
  for (int i = 0; i < k.arguments; ++i)
    if (!l.places[i]) l.places[i] = l.words[i].data();
  return l;
}
static u64 make_counter() {
  u64 at = 0;
  CHECK(cu.allocate(&at, sizeof counter_start));
  return at;
}
static unsigned word_of(u64 counter, int i) {
  unsigned x = 0;
  CHECK(cu.to_host(&x, counter + 4 * i, 4));
  return x;
}
static void watchdog(int) {
  static const char text[] = "watchdog: a kernel does not end\n";
  if (write(2, text, sizeof text - 1) < 0) std::_Exit(3);
  std::_Exit(3);
}

int main() {
  std::signal(SIGALRM, watchdog);
  alarm(120);
  open_driver();
  int device = 0, major = 0, minor = 0;
  void* context = nullptr;
  CHECK(cu.init(0));
  CHECK(cu.device(&device, 0));
  CHECK(cu.retain(&context, device));
  CHECK(cu.current(context));
  CHECK(cu.attribute(&major, 75, device));
  CHECK(cu.attribute(&minor, 76, device));
  const std::string arch = major == 9 && minor == 0 ? "sm_90a" : "sm_80";
  Memory one = memory(), both = memory();
  const u64 counter = make_counter();
  std::vector<Loaded> serial;
  for (const Kernel& k : originals) serial.push_back(load(k, one, counter, arch));
  Loaded fused = load(fused_kernel, both, counter, arch), rest = load(rest_kernel, both, counter, arch);
  auto run_serial = [&] {
    run(originals[0], serial[0]);
    for (int c = 0; c < cycles; ++c)
      for (size_t i = 1; i < serial.size(); ++i) run(originals[i], serial[i]);
  };
  auto start = [&](unsigned limit) {
    CHECK(cu.to_device(counter, counter_start, sizeof counter_start));
    CHECK(cu.to_device(counter + 4 * LIMIT, &limit, 4));
  };

  // right?
  reset(one), reset(both);
  run_serial();
  CHECK(cu.wait());
  alarm(120);
  start(fused_limit);
  run(fused_kernel, fused);
  CHECK(cu.wait());
  const unsigned inside = word_of(counter, FINISHED);
  CHECK(cu.to_device(counter + 4 * LIMIT, &total_blocks, 4));
  run(rest_kernel, rest);
  CHECK(cu.wait());
  const unsigned finished = word_of(counter, FINISHED);
  bool good = finished == total_blocks && inside <= fused_limit;
  if (!good) std::printf("%u of %u blocks ran\n", finished, total_blocks);
  good &= same(both, one);
  good &= guarded(one) && guarded(both);
  std::printf("results: %s\n", good ? "equal" : "WRONG");
  std::printf("best-effort blocks: %u of %u in the fused launch\n", inside, total_blocks);
  if (!good) return 1;

  // how fast: each does all of the work, in turn
  void *a = nullptr, *b = nullptr, *c = nullptr;
  CHECK(cu.event(&a, 0));
  CHECK(cu.event(&b, 0));
  CHECK(cu.event(&c, 0));
  int lowest = 0, highest = 0;
  void *high = nullptr, *low = nullptr;
  CHECK(cu.priorities(&lowest, &highest));
  CHECK(cu.stream(&high, NON_BLOCKING, highest));
  CHECK(cu.stream(&low, NON_BLOCKING, lowest));
  std::vector<float> serial_ms, streams_ms, fused_ms, alone_ms;
  for (int i = 0; i < 23; ++i) {
    alarm(120);
    float ms = 0.0f;
    CHECK(cu.record(a, nullptr));
    run(originals[0], serial[0]);
    CHECK(cu.record(b, nullptr));
    for (int n = 0; n < cycles; ++n)
      for (size_t k = 1; k < serial.size(); ++k) run(originals[k], serial[k]);
    CHECK(cu.record(c, nullptr));
    CHECK(cu.wait());
    CHECK(cu.elapsed(&ms, a, b));
    if (i >= 3) alone_ms.push_back(ms);
    CHECK(cu.elapsed(&ms, a, c));
    if (i >= 3) serial_ms.push_back(ms);
    CHECK(cu.record(a, high));
    CHECK(cu.follow(low, a, 0));
    run(originals[0], serial[0], high);
    for (int n = 0; n < cycles; ++n)
      for (size_t k = 1; k < serial.size(); ++k) run(originals[k], serial[k], low);
    CHECK(cu.record(b, low));
    CHECK(cu.follow(high, b, 0));
    CHECK(cu.record(c, high));
    CHECK(cu.wait());
    CHECK(cu.elapsed(&ms, a, c));
    if (i >= 3) streams_ms.push_back(ms);
    start(fused_limit);
    CHECK(cu.record(a, nullptr));
    run(fused_kernel, fused);
    CHECK(cu.record(b, nullptr));
    CHECK(cu.wait());
    CHECK(cu.to_device(counter + 4 * LIMIT, &total_blocks, 4));
    float first = 0.0f;
    CHECK(cu.elapsed(&first, a, b));
    CHECK(cu.record(a, nullptr));
    run(rest_kernel, rest);
    CHECK(cu.record(b, nullptr));
    CHECK(cu.wait());
    CHECK(cu.elapsed(&ms, a, b));
    if (i >= 3) fused_ms.push_back(word_of(counter, FINISHED) == inside && inside == total_blocks ? first : first + ms);
  }
  auto median = [](std::vector<float> x) { std::sort(x.begin(), x.end()); return x[x.size() / 2]; };
  const float serial_median = median(serial_ms), streams_median = median(streams_ms);
  const float fused_median = median(fused_ms), best = std::min(serial_median, streams_median);
  std::printf("latency-critical alone %.4f ms, both one after the other %.4f ms, on streams of two priorities %.4f ms, "
              "fused (with what was left) %.4f ms\n",
              median(alone_ms), serial_median, streams_median, fused_median);
  std::printf("fused is %.3f times as fast as the best of these peers (%s)\n", best / fused_median,
              streams_median < serial_median ? "streams" : "one after the other");
  return 0;
}
