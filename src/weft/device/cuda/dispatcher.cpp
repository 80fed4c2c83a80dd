// Puts work on CUDA streams from a thread of its own, in the order in which it was asked for, and says when it was over.
//
// The caller pushes commands into a ring of one producer and one consumer and goes on at once. The thread carries them
// out, looks in turn at the events that somebody waits for, and stamps each with the host's clock when it is seen to have
// happened. A second thread stamps arrivals at instants that were fixed before, whatever the caller does meanwhile; a
// third reads the clock of the multiprocessors. Nothing here allocates once it runs.
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <new>

namespace {

using Handle = void*;
enum Op : int64_t { RECORD, MARK, WAIT, GRAPH, WRITE, COPY, FILL };

struct Command {
  int64_t op;
  uint64_t a, b, c, d;
};

// What the caller reads: `Dispatcher._words` in Python. The threads alone write it.
struct Status {
  int64_t failed_op;  // 0: none, else 1 + the operation that failed; -1: an event could not be asked
  int64_t result;     // its CUresult
  int64_t done;       // commands that were carried out
  int64_t sent;       // arrivals
  int64_t clock_mhz;
};
struct Event {
  int64_t put_ns;    // when it was last put on a stream
  int64_t seen;      // how often it had been recorded when it was last seen to have happened
  int64_t seen_ns;   // when that was
  int64_t apart_ns;  // from the event that it was marked with, by the GPU's clock
};
constexpr uint32_t RING = 8192;  // commands
constexpr int EVENTS = 16384;

struct Driver {
  int (*set_current)(Handle);
  int (*event_create)(Handle*, unsigned);
  int (*event_destroy)(Handle);
  int (*event_record)(Handle, Handle);
  int (*event_query)(Handle);
  int (*event_elapsed)(float*, Handle, Handle);
  int (*stream_wait)(Handle, Handle, unsigned);
  int (*graph_launch)(Handle, Handle);
  int (*write_value)(Handle, uint64_t, uint32_t, unsigned);
  int (*copy_to_host)(void*, uint64_t, size_t, Handle);
  int (*copy_to_device)(uint64_t, const void*, size_t, Handle);
};
constexpr int NOT_READY = 600;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void nap(int64_t ns) {
  const timespec t = {ns / 1000000000LL, ns % 1000000000LL};
  nanosleep(&t, nullptr);
}

struct Dispatcher {
  Driver driver;
  Handle context;
  int64_t spin_ns;  // it looks without a rest for so long behind the last thing that happened
  Status* status;
  Event* events;
  Handle handles[EVENTS];
  int64_t told[EVENTS];  // how often each was recorded
  int since[EVENTS];     // the event that it was marked with; -1: none
  bool watched[EVENTS];
  int watch[EVENTS], watching;
  alignas(64) std::atomic<uint64_t> pushed;
  alignas(64) std::atomic<uint64_t> popped;
  alignas(64) std::atomic<bool> over;
  Command ring[RING];
  pthread_t thread, sender, clock;
  bool sends, clocks;
  std::atomic<bool> sending;
  const int64_t* times;
  int64_t* sent_ns;
  int64_t count, begin_ns;
  sem_t clock_over;
  int (*clock_info)(Handle, int, unsigned*);
  Handle gpu;
};

template <class F>
bool symbol(void* library, const char* name, F*& found) {
  found = (F*)dlsym(library, name);
  return found != nullptr;
}

int carry_out(Dispatcher& d, const Command& c) {
  const Driver& v = d.driver;
  switch (c.op) {
    case RECORD:
    case MARK: {
      const int e = (int)c.a;
      d.events[e].put_ns = now_ns();
      const int result = v.event_record(d.handles[e], (Handle)c.b);
      ++d.told[e];
      if (c.op == MARK) {
        d.since[e] = (int)(int64_t)c.c;
        if (!d.watched[e]) d.watch[d.watching++] = e;
        d.watched[e] = true;
      }
      return result;
    }
    case WAIT: return v.stream_wait((Handle)c.a, d.handles[c.b], 0);
    case GRAPH: return v.graph_launch((Handle)c.a, (Handle)c.b);
    case WRITE: return v.write_value((Handle)c.a, c.b, (uint32_t)c.c, 0);
    case COPY: return v.copy_to_host((void*)c.a, c.b, (size_t)c.c, (Handle)c.d);
    case FILL: return v.copy_to_device(c.a, (const void*)c.b, (size_t)c.c, (Handle)c.d);
  }
  return 1;
}

void fail(Dispatcher& d, int64_t op, int result) {
  if (d.status->failed_op) return;
  d.status->result = result;
  std::atomic_thread_fence(std::memory_order_release);
  *(volatile int64_t*)&d.status->failed_op = op;
}

// Ask all events that somebody waits for; whether one of them has happened.
bool look(Dispatcher& d) {
  bool found = false;
  for (int i = 0; i < d.watching;) {
    const int e = d.watch[i];
    const int result = d.driver.event_query(d.handles[e]);
    if (result == NOT_READY) {
      ++i;
      continue;
    }
    Event& event = d.events[e];
    event.seen_ns = now_ns();
    if (result) {
      fail(d, -1, result);
    } else if (d.since[e] >= 0) {
      float ms = 0;
      if (const int bad = d.driver.event_elapsed(&ms, d.handles[d.since[e]], d.handles[e])) fail(d, -1, bad);
      event.apart_ns = (int64_t)((double)ms * 1e6 + 0.5);
    }
    std::atomic_thread_fence(std::memory_order_release);
    *(volatile int64_t*)&event.seen = d.told[e];
    d.watched[e] = false;
    memmove(d.watch + i, d.watch + i + 1, sizeof(int) * (size_t)(--d.watching - i));  // first those that came first
    found = true;
  }
  return found;
}

void* dispatch(void* given) {
  Dispatcher& d = *(Dispatcher*)given;
  if (const int result = d.driver.set_current(d.context)) fail(d, -1, result);
  int64_t last = now_ns();
  for (unsigned rounds = 0;; ++rounds) {
    const uint64_t at = d.popped.load(std::memory_order_relaxed);
    bool busy = at != d.pushed.load(std::memory_order_acquire);
    if (busy) {
      const Command& c = d.ring[at % RING];
      if (!d.status->failed_op)  // what follows a failure is not carried out
        if (const int result = carry_out(d, c)) fail(d, c.op + 1, result);
      d.popped.store(at + 1, std::memory_order_release);
      *(volatile int64_t*)&d.status->done = (int64_t)at + 1;
    } else if (d.over.load(std::memory_order_acquire) && at == d.pushed.load(std::memory_order_acquire)) {
      return nullptr;
    } else if (d.watching) {
      busy = look(d);
    }
    if (busy) {
      last = now_ns();
    } else if (rounds % 64 == 0 && now_ns() - last > d.spin_ns) {
      nap(50000);
    } else {
      relax();
    }
  }
}

void* send(void* given) {
  Dispatcher& d = *(Dispatcher*)given;
  for (int64_t i = 0; i < d.count && d.sending.load(std::memory_order_relaxed);) {
    const int64_t at = d.begin_ns + d.times[i];
    const int64_t now = now_ns();
    if (now >= at) {
      d.sent_ns[i] = now;
      std::atomic_thread_fence(std::memory_order_release);
      *(volatile int64_t*)&d.status->sent = ++i;
    } else if (at - now > 5000000) {
      nap(at - now > 25000000 ? 20000000 : at - now - 4000000);
    } else {
      relax();
    }
  }
  return nullptr;
}

void* read_clock(void* given) {
  Dispatcher& d = *(Dispatcher*)given;
  for (;;) {
    unsigned mhz = 0;
    if (d.clock_info(d.gpu, 1, &mhz) == 0) *(volatile int64_t*)&d.status->clock_mhz = mhz;
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 2;  // seldom: it takes milliseconds, and launches were seen to wait for it
    if (sem_timedwait(&d.clock_over, &until) == 0) return nullptr;
  }
}

void cease_sending(Dispatcher& d) {
  if (!d.sends) return;
  d.sending.store(false, std::memory_order_relaxed);
  pthread_join(d.sender, nullptr);
  d.sends = false;
}

}  // namespace

extern "C" {

// A dispatcher of a context, or nullptr: no such driver, or no thread. `words` has room for a status and all events.
void* weft_dispatcher(const char* library, void* context, int64_t spin_ns, void* words) {
  void* lib = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!lib) return nullptr;
  Driver v;
  if (!symbol(lib, "cuCtxSetCurrent", v.set_current) ||
      !symbol(lib, "cuEventCreate", v.event_create) ||
      !symbol(lib, "cuEventDestroy_v2", v.event_destroy) ||
      !symbol(lib, "cuEventRecord", v.event_record) ||
      !symbol(lib, "cuEventQuery", v.event_query) ||
      !symbol(lib, "cuEventElapsedTime", v.event_elapsed) ||
      !symbol(lib, "cuStreamWaitEvent", v.stream_wait) ||
      !symbol(lib, "cuGraphLaunch", v.graph_launch) ||
      !symbol(lib, "cuStreamWriteValue32_v2", v.write_value) ||
      !symbol(lib, "cuMemcpyDtoHAsync_v2", v.copy_to_host) ||
      !symbol(lib, "cuMemcpyHtoDAsync_v2", v.copy_to_device))
    return nullptr;
  void* memory;  // by the C library alone: C++'s is not linked
  if (posix_memalign(&memory, alignof(Dispatcher), sizeof(Dispatcher))) return nullptr;
  Dispatcher* d = new (memory) Dispatcher();
  d->driver = v;
  d->context = context;
  d->spin_ns = spin_ns;
  d->status = (Status*)words;
  d->events = (Event*)((char*)words + sizeof(Status));
  if (pthread_create(&d->thread, nullptr, dispatch, d)) {
    free(d);
    return nullptr;
  }
  return d;
}

// A new event with this number, in the caller's current context; the CUresult, or -1 where there are too many.
int weft_event(void* given, int number) {
  Dispatcher& d = *(Dispatcher*)given;
  return number < EVENTS ? d.driver.event_create(&d.handles[number], 0) : -1;
}

// Ask for a command. Waits only where thousands have not been carried out.
void weft_push(void* given, int64_t op, uint64_t a, uint64_t b, uint64_t c, uint64_t d4) {
  Dispatcher& d = *(Dispatcher*)given;
  const uint64_t at = d.pushed.load(std::memory_order_relaxed);
  while (at - d.popped.load(std::memory_order_acquire) >= RING) relax();
  d.ring[at % RING] = {op, a, b, c, d4};
  d.pushed.store(at + 1, std::memory_order_release);
}

// What was read of the words before this is at least as old as what is read behind it.
void weft_acquire() { std::atomic_thread_fence(std::memory_order_acquire); }

// Wait until all commands have been carried out.
void weft_drain(void* given) {
  Dispatcher& d = *(Dispatcher*)given;
  const uint64_t at = d.pushed.load(std::memory_order_relaxed);
  for (unsigned rounds = 0; d.popped.load(std::memory_order_acquire) != at; ++rounds)
    rounds < 20000 ? relax() : nap(20000);
}

// Stamp arrivals at `begin_ns + times[i]` from now on, each into `sent_ns[i]`; 0, or what pthread_create says.
int weft_send(void* given, const int64_t* times, int64_t* sent_ns, int64_t count, int64_t begin_ns) {
  Dispatcher& d = *(Dispatcher*)given;
  cease_sending(d);
  d.times = times, d.sent_ns = sent_ns, d.count = count, d.begin_ns = begin_ns;
  d.status->sent = 0;
  d.sending.store(true);
  const int result = pthread_create(&d.sender, nullptr, send, &d);
  d.sends = result == 0;
  return result;
}

// Read the clock of the multiprocessors now and then; false: the driver does not say.
bool weft_clock(void* given, const char* library, const char* uuid) {
  Dispatcher& d = *(Dispatcher*)given;
  void* lib = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  int (*init)();
  int (*by_uuid)(const char*, Handle*);
  if (!lib || d.clocks || !symbol(lib, "nvmlInit_v2", init) ||
      !symbol(lib, "nvmlDeviceGetHandleByUUID", by_uuid) ||
      !symbol(lib, "nvmlDeviceGetClockInfo", d.clock_info))
    return false;
  if (init() || by_uuid(uuid, &d.gpu) || sem_init(&d.clock_over, 0, 0)) return false;
  d.clocks = pthread_create(&d.clock, nullptr, read_clock, &d) == 0;
  return d.clocks;
}

// Carry out what was asked for, end all threads, and give the first `events` events back.
void weft_close(void* given, int events) {
  Dispatcher* d = (Dispatcher*)given;
  cease_sending(*d);
  d->over.store(true, std::memory_order_release);
  pthread_join(d->thread, nullptr);
  if (d->clocks) {
    sem_post(&d->clock_over);
    pthread_join(d->clock, nullptr);
    sem_destroy(&d->clock_over);
  }
  for (int i = 0; i < events; ++i) d->driver.event_destroy(d->handles[i]);
  free(d);
}

}  // extern "C"
