// A CUDA driver whose streams are times: work on a stream ends so many nanoseconds after what was before it. A stream is
// a number below 16, a graph is the nanoseconds that it takes. It notes each call; `STUB_FAULT` names one that fails.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
struct Event { int64_t at; };
static int64_t busy[16];
static void* context;
static char notes[1 << 20];
static size_t end;
static int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static int64_t& stream(void* s) {
  int64_t& x = busy[(size_t)s & 15];
  if (x < now()) x = now();
  return x;
}
static int note(const char* name, size_t a, size_t b) {
  if (end < sizeof notes - 80) end += snprintf(notes + end, 80, "%s %zu %zu\n", name, a, b);
  const char* fault = getenv("STUB_FAULT");
  return fault && strcmp(fault, name) == 0 ? 719 : 0;
}
extern "C" {
const char* stub_notes() { return notes; }
void* stub_context() { return context; }
int cuCtxSetCurrent(void* c) { return context = c, note("current", 0, 0); }
int cuEventCreate(void** e, unsigned) { return *e = new Event{0}, 0; }
int cuEventDestroy_v2(void* e) { return delete (Event*)e, note("destroy", 0, 0); }
int cuEventRecord(void* e, void* s) { return ((Event*)e)->at = stream(s), note("record", (size_t)s, 0); }
int cuEventQuery(void* e) {
  const char* fault = getenv("STUB_FAULT");
  if (fault && strcmp(fault, "query") == 0) return 700;
  return ((Event*)e)->at <= now() ? 0 : 600;
}
int cuEventElapsedTime(float* ms, void* a, void* b) {
  return *ms = (float)((((Event*)b)->at - ((Event*)a)->at) / 1e6), 0;
}
int cuStreamWaitEvent(void* s, void* e, unsigned) {
  int64_t& x = stream(s);
  if (x < ((Event*)e)->at) x = ((Event*)e)->at;
  return note("wait", (size_t)s, 0);
}
int cuGraphLaunch(void* g, void* s) { return stream(s) += (int64_t)g, note("graph", (size_t)g, (size_t)s); }
int cuStreamWriteValue32_v2(void* s, uint64_t to, uint32_t value, unsigned) {
  return *(uint32_t*)to = value, note("write", (size_t)s, value);
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, void* s) {
  return memcpy(to, (void*)from, n), note("copy", n, (size_t)s);
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, void* s) {
  return memcpy((void*)to, from, n), note("fill", n, (size_t)s);
}
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** gpu) { return *gpu = nullptr, strcmp(uuid, "GPU-1-2") ? 6 : 0; }
int nvmlDeviceGetClockInfo(void*, int, unsigned* mhz) { return *mhz = 1755, 0; }
}
