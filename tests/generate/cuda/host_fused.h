// Stands in for what weft_cuda_fused.h names of the machine, after host_tensor.h and host_tma.h: named barriers of roles
// with their numbers and counts checked, memory that other CTAs write, registers that warpgroups move.
// W_ORDER 3: threads run in a random order, and stop at random places between two accesses to such memory.
struct Named { int wanted = 0, kind = 0; unsigned arrived = 0, generation = 0, result = 0; std::map<unsigned, unsigned> warps; };
struct Zone { unsigned first, threads; int lowest, count; };  // a role: its threads and its barriers
static std::map<Block*, std::map<int, Named>> w_named;
static std::vector<Zone> w_zones;
static unsigned long w_switches;
static std::function<void()> w_every;  // now and then, as the host beside a running kernel
static u64 w_random_state = 1;
inline u32 w_random() {
  w_random_state = w_random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (u32)(w_random_state >> 33);
}
inline void w_maybe() {
  if (w_every && ++w_switches % 64 == 0) w_every();
  if (w_order == 3 && w_random() % 4 == 0) w_yield();
}
// a barrier of `n` threads, number `id`; kind 1: sync and arrive, 2: or, 3: count
inline unsigned w_at_barrier(int id, int n, int kind, unsigned value, bool waits) {
  const unsigned t = threadIdx.x;
  bool mine = false, theirs = false;
  for (const Zone& z : w_zones) {
    const bool numbered = id >= z.lowest && id < z.lowest + z.count, inside = t >= z.first && t < z.first + z.threads;
    mine |= numbered && inside;
    theirs |= numbered && !inside;
  }
  if (theirs && !mine) w_fail("a barrier of another role");
  if (!mine) w_fail("a barrier of no role");
  if (n <= 0 || n % 32) w_fail("a barrier of no whole warps");
  Named& b = w_named[w_self->block][id];
  if (b.arrived == 0) b.wanted = n, b.kind = kind, b.result = 0, b.warps.clear();
  if (b.wanted != n) w_fail("threads at a barrier disagree about their number");
  if (b.kind != kind) w_fail("threads at a barrier disagree about its kind");
  const unsigned mine_now = b.generation;
  b.result = kind == 3 ? b.result + value : b.result | value;
  ++b.warps[t / 32];
  ++w_progress;
  static std::map<std::pair<Block*, std::pair<int, unsigned>>, unsigned> results;
  if ((int)++b.arrived == b.wanted) {
    for (auto& w : b.warps)
      if (w.second != 32) w_fail("a part of a warp at a barrier");
    results[{w_self->block, {id, mine_now & 1}}] = b.result;
    b.arrived = 0;
    ++b.generation;
  } else if (waits) {
    while (w_named[w_self->block][id].generation == mine_now) w_yield();
  }
  return results[{w_self->block, {id, mine_now & 1}}];
}
template <int ID, int N> inline void w_barrier() { w_at_barrier(ID, N, 1, 0, true); }
template <int ID> inline void w_barrier_of(int n) { w_at_barrier(ID, n, 1, 0, true); }
template <int ID, int N> inline void w_barrier_arrive() { w_at_barrier(ID, N, 1, 0, false); }
template <int ID> inline void w_barrier_arrive_of(int n) { w_at_barrier(ID, n, 1, 0, false); }
template <int ID, int N> inline bool w_barrier_or(bool x) { return w_at_barrier(ID, N, 2, x, true) != 0; }
template <int ID, int N> inline int w_barrier_count(bool x) { return (int)w_at_barrier(ID, N, 3, x, true); }
inline bool w_barrier_or_all(bool x) { return w_any_thread(x); }
inline int w_barrier_count_all(bool x) {
  static int sum[2];
  Block& b = *w_self->block;
  const unsigned slot = b.bar.generation & 1;
  sum[slot] += x;
  w_meet(b.bar);
  const int r = sum[slot];
  w_meet(b.bar);
  sum[slot] = 0;
  return r;
}
inline unsigned w_grid_y() { return w_grid.y; }
inline unsigned w_grid_z() { return w_grid.z; }
inline void w_all_threads() { w_meet(w_self->block->bar); }
// LC's threads of a cluster, and no others
static Barrier w_cluster_lc;
template <unsigned WARPS, unsigned CTAS> inline void w_cluster_begin(const unsigned char* p) {
  const u32 at = (u32)(p - w_self->block->shared);
  if (at % 8 || at + 16 > w_self->block->shared_bytes) w_fail("cluster barriers beyond shared memory");
  if (CTAS != w_cluster->size()) w_fail("a cluster of another size");
  if (w_zones.empty() || w_zones[0].first != 0 || w_zones[0].threads != WARPS * 32) w_fail("a cluster of other threads");
  w_meet(w_cluster_barrier);
  w_cluster_lc.total = WARPS * 32 * CTAS;
}
template <unsigned WARPS, unsigned CTAS> inline void w_cluster_meet(const unsigned char*) {
  if (w_self->index.x >= WARPS * 32) w_fail("a cluster's barrier of another role");
  w_meet(w_cluster_lc);
}
inline unsigned w_peek(const unsigned* p) { w_maybe(); return *p; }
inline u64 w_peek(const u64* p) { w_maybe(); return *p; }
inline void w_poke(unsigned* p, unsigned x) { w_maybe(); *p = x; ++w_progress; }
inline void w_publish(unsigned* p, unsigned x) { w_maybe(); *p = x; ++w_progress; }
inline u64 w_take(u64* p, u64 n) { w_maybe(); const u64 x = *p; *p += n; ++w_progress; return x; }
inline unsigned w_report(unsigned* p, unsigned n) { w_maybe(); const unsigned x = *p; *p += n; ++w_progress; return x; }
inline bool w_exchange(u64* p, u64 from, u64 to) {
  w_maybe();
  ++w_progress;
  if (*p != from) return false;
  *p = to;
  return true;
}
inline void w_settled() {}
inline unsigned w_seen(const unsigned* p) { w_maybe(); return *p; }
inline unsigned w_warp_ended(unsigned* p) {
  w_meet(w_self->warp->bar);
  ++w_progress;
  return w_self->lane == 0 ? ++*p : 0u;
}
inline void w_tell(unsigned* p) { w_maybe(); ++*p; ++w_progress; }
static u64 w_clock_ns = 0;
inline u64 w_now() { return w_clock_ns += 100; }
inline u64 w_timer() { return w_clock_ns / 32 * 32; }
inline void w_pause(unsigned ns) {
  w_clock_ns += ns;
  if (w_every) { w_every(); ++w_progress; }
  w_yield();
}
inline unsigned w_told(unsigned x) { return x; }
inline unsigned w_sm() { return w_self->block->rank; }
// Registers: a warpgroup that asks for more waits until others have given theirs away.
static std::map<Block*, long> w_registers_free;
static int w_registers_at_launch;  // 0: nobody counts
static std::map<Thread*, int> w_registers;
inline void w_take_registers(int n, bool more) {
  if (w_registers_at_launch == 0) return;
  const auto found = w_registers.find(w_self);
  const int now = found == w_registers.end() ? w_registers_at_launch : found->second;
  if (n % 8 || n < 24 || n > 256) w_fail("a number of registers that setmaxnreg does not take");
  if (more ? n < now : n > now) w_fail("registers moved the wrong way");
  while (w_registers_free[w_self->block] < n - now) w_yield();
  w_registers_free[w_self->block] -= n - now;
  w_registers[w_self] = n;
  ++w_progress;
}
static const bool w_forgets_roles = (w_begin = [before = w_begin] {
  before();
  w_named.clear(), w_registers.clear(), w_registers_free.clear();
  w_cluster_lc = Barrier{0, 0, 0};
}, true);
static const bool w_random_order = (w_chance = w_random, true);
// Static shared memory: each block has its own (`FusedKernels` numbers the declarations).
static std::map<Block*, std::map<int, std::vector<u64>>> w_statics;
inline std::vector<u64>& w_static_of(Block* block, int number, size_t bytes) {
  std::vector<u64>& found = w_statics[block][number];
  if (found.empty()) found.assign(bytes / 8 + 1, 0x7FF87FF87FF87FF8ull);
  return found;
}
inline void* w_static(int number, size_t bytes) {
  w_statics[w_self->block];
  return w_static_of(w_self->block, number, bytes).data();
}
static const bool w_other_blocks = (w_there = [before = w_there](const void* p, unsigned rank) {
  for (auto& [number, words] : w_statics[w_self->block]) {
    const long at = (const unsigned char*)p - (const unsigned char*)words.data();
    if (at >= 0 && at < 8l * (long)words.size())
      return (unsigned char*)w_static_of(&(*w_cluster)[rank], number, 8 * words.size() - 8).data() + at;
  }
  return before(p, rank);
}, w_begin = [before = w_begin] { before(); w_statics.clear(); }, true);
#define W_DYNAMIC_16(name, bytes) W_DYNAMIC(name)
#define W_TABLE static const
template <class... A, size_t... I> void w_call_with(void (*f)(A...), void* const* a, std::index_sequence<I...>) {
  f((A)a[I]...);
}
template <class... A> void w_call(void (*f)(A...), void* const* a) { w_call_with(f, a, std::index_sequence_for<A...>{}); }
extern "C" void add_buffer(char* p, long n) { w_buffers.push_back({p, p + n}); }
extern "C" void clear_buffers() { w_buffers.clear(); }
extern "C" void set_order(int order, u64 seed, int registers) {
  w_order = order, w_random_state = seed, w_registers_at_launch = registers;
  w_switches = seed * 0x9E3779B97F4A7C15ull >> 58;  // when the host looks first
}
extern "C" void set_roles(const int* zones, int n) {
  w_zones.clear();
  for (int i = 0; i < n; ++i)
    w_zones.push_back({(unsigned)zones[4 * i], (unsigned)zones[4 * i + 1], zones[4 * i + 2], zones[4 * i + 3]});
}
extern "C" void set_clock(u64 ns) { w_clock_ns = ns; }
extern "C" u64 clock_now() { return w_clock_ns; }
extern "C" void set_rounds(unsigned long most) { w_most_rounds = most; }
extern "C" void set_host(void (*every)()) {
  if (every) w_every = every; else w_every = nullptr;
}
