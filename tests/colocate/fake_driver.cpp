// A CUDA driver of one pair on the host, for tests of the test program: memory is memory, and kernels are the loops below.
// FAKE_FAULT says what goes wrong. The pair: lc: y = 2 x + 1 of 256 floats; be: z += w of 1024 numbers in 4 blocks.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
typedef unsigned long long u64;
static std::string fault() { const char* f = std::getenv("FAKE_FAULT"); return f ? f : ""; }
static void lc(const float* x, float* y) { for (int i = 0; i < 256; ++i) y[i] = 2.0f * x[i] + 1.0f; }
static void be(const float* w, float* z, float step, unsigned block) {
  for (unsigned i = 256 * block; i < 256 * block + 256; ++i) z[i] += w[i] * step;
}
static float step_of(const void* word) { float f; std::memcpy(&f, word, 4); return f; }
static int recorded = 0;  // whether the last event was on a stream of its own
extern "C" {
int cuInit(unsigned) { return fault() == "init" ? 100 : 0; }
int cuDeviceGet(int* d, int) { return *d = 0; }
int cuDeviceGetAttribute(int* x, int what, int) { return *x = what == 75 ? 9 : 0, 0; }
int cuDevicePrimaryCtxRetain(void** c, int) { return *c = nullptr, 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuModuleLoad(void** m, const char* name) { return *m = strdup(name), 0; }
int cuModuleGetFunction(void** f, void* m, const char*) { return *f = m, 0; }
int cuModuleGetGlobal_v2(u64*, size_t*, void*, const char*) { return 500; }
int cuMemAlloc_v2(u64* at, size_t n) { return *at = (u64)std::aligned_alloc(4096, (n + 4095) / 4096 * 4096), 0; }
int cuMemcpyHtoD_v2(u64 to, const void* from, size_t n) { return std::memcpy((void*)to, from, n), 0; }
int cuMemcpyDtoH_v2(void* to, u64 from, size_t n) { return std::memcpy(to, (void*)from, n), 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuCtxSynchronize() {
  if (fault() == "hang") std::raise(SIGALRM);  // as the watchdog has it
  return 0;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, 0; }
int cuStreamCreateWithPriority(void** s, unsigned flags, int priority) {
  *s = (void*)(size_t)(priority < 0 ? 2 : 1);  // high, low
  return flags == 1 && fault() != "stream" ? 0 : 100;
}
int cuStreamWaitEvent(void* s, void*, unsigned) { return s ? 0 : 400; }
int cuEventCreate(void** e, unsigned) { return *e = nullptr, 0; }
int cuEventRecord(void*, void* s) { return recorded = s ? recorded | 1 : 0, 0; }
int cuEventElapsedTime(float* ms, void*, void*) { return *ms = recorded && fault() == "fast streams" ? 0.5f : 1.0f, 0; }
int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_NO_DEVICE", 0; }
int cuTensorMapEncodeTiled() { return 1; }
int cuLaunchKernel(void* f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* s, void** a, void**) {
  const std::string file = (const char*)f;
  if ((size_t)s == 1 && file == "lc.sm_90a.cubin") return 400;  // on the stream of low priority
  if ((size_t)s == 2 && file != "lc.sm_90a.cubin") return 400;
  auto pointer = [&](int i) { return *(float**)a[i]; };
  if (file == "lc.sm_90a.cubin") lc(pointer(0), pointer(1));
  if (file == "be0.sm_90a.cubin")
    for (unsigned b = 0; b < 4; ++b) be(pointer(0), pointer(1), step_of(a[2]), b);
  const bool fused = file == "fused.sm_90a.cubin";
  if (fused || file == "rest.sm_90a.cubin") {
    const int first = fused ? 2 : 0;
    if (fused) lc(pointer(0), pointer(1));
    unsigned* counter = (unsigned*)pointer(first + 3);
    while (counter[1] < counter[2]) {
      const unsigned b = counter[1]++;
      if (fault() == "lost" && b == 2) continue;
      be(pointer(first), pointer(first + 1), step_of(a[first + 2]), b);
      if (fault() == "twice" && b == 1) be(pointer(first), pointer(first + 1), step_of(a[first + 2]), b);
      ++counter[5];
    }
    if (fused && fault() == "result") pointer(1)[200] += 1.0f;
    if (fused && fault() == "input") pointer(0)[3] += 1.0f;
    if (fused && fault() == "beside") ((unsigned char*)pointer(3))[4096 + 5] ^= 1;
    if (fused && fault() == "last bit") ((unsigned char*)pointer(3))[4] ^= 1;
  }
  return 0;
}
struct Config { unsigned grid[3], block[3], shared; void* stream; int* attributes; unsigned count; };
int cuLaunchKernelEx(const Config* c, void* f, void** a, void** extra) {
  const int* x = c->attributes;  // id, padding, then the value
  if (c->count != 1 || x[0] != 4 || x[2] != 2 || x[3] != 1 || x[4] != 1 || c->grid[0] != 4) return 1;
  if (fault() == "clusters") std::fprintf(stderr, "%s in clusters\n", (const char*)f);
  return cuLaunchKernel(f, c->grid[0], 1, 1, c->block[0], 1, 1, c->shared, c->stream, a, extra);
}
}
