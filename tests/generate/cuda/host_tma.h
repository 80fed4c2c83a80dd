// Stands in for weft_cuda_tma.h on the host, after host_tensor.h: tensor maps, barriers that count bytes, operands by
// descriptor. W_DEFER 1: copies and products happen as late as the kernel's waits allow; 2: products only.
#include <map>
struct w_record { long long address, size, rank, swizzle, sizes[5], strides[5], box[5], steps[5]; };
struct w_map {
  const w_record* r;
  w_map(void* p) : r((const w_record*)p) {}
};
struct Arrivals { unsigned total = 0, left = 0, phase = 0; long long bytes = 0; std::vector<std::function<void()>> late; };
static std::map<std::pair<Block*, u32>, Arrivals> w_arrivals;
static const bool w_forgets = (w_begin = [] { w_arrivals.clear(); }, true);  // barriers of the blocks before
inline Arrivals& w_bar(u32 at) {
  const auto found = w_arrivals.find({w_self->block, at});
  if (at % 8 || found == w_arrivals.end()) w_fail("no barrier there");
  return found->second;
}
inline void w_bar_init(u32 at, u32 n) {
  if (at % 8 || at + 8 > w_self->block->shared_bytes) w_fail("barrier beyond shared memory");
  w_arrivals[{w_self->block, at}] = Arrivals{n, n};
}
inline void w_bar_ready() {}
inline void w_settle(Arrivals& b) {
  ++w_progress;
  if (b.left == 0 && b.bytes == 0) { b.phase ^= 1; b.left = b.total; }
}
inline void w_bar_arrive(u32 at) {
  Arrivals& b = w_bar(at);
  if (b.left == 0) w_fail("an arrival too many");
  --b.left;
  w_settle(b);
}
inline void w_bar_expect(u32 at, u32 bytes) { w_bar(at).bytes += bytes; w_bar_arrive(at); }
inline void w_bar_wait(u32 at, u32 parity) {
  Arrivals& b = w_bar(at);
  while (b.phase == parity) {
    auto late = std::move(b.late);
    b.late.clear();
    for (auto& copy : late) copy();
    if (b.phase == parity) w_yield();
  }
  ++w_progress;
}
inline void w_named_barrier(int number, int threads) {
  w_self->block->order[number].total = threads;
  w_meet(w_self->block->order[number]);
}
inline void w_named_barrier_arrive(int number, int threads) {
  Barrier& b = w_self->block->order[number];
  b.total = threads;
  ++w_progress;
  if (++b.count == b.total) b.count = 0, ++b.generation;
}
#ifdef W_FUSED
inline void w_take_registers(int n, bool more);
template <int N> inline void w_fewer_registers() { w_take_registers(N, false); }
template <int N> inline void w_more_registers() { w_take_registers(N, true); }
#else
template <int N> inline void w_fewer_registers() {}
template <int N> inline void w_more_registers() {}
#endif
inline void w_map_prefetch(const w_map*) {}
// does something as a thread of each block of the cluster, or of one
inline void w_as(Block& b, std::function<void()> what) {
  bool there = false;
  for (auto& t : b.threads) there |= !t.done;
  if (!there) w_fail("a block that has ended is reached");
  Thread* const now = w_self;
  w_self = &b.threads[0];
  what();
  w_self = now;
}
static u32 w_mates = 0;  // blocks of a real cluster, where several of these run at once; 0: as many as run
inline Block& w_mate(u32 rank) {
  const u32 count = w_mates ? w_mates : (u32)w_cluster->size();
  if (rank >= count) w_fail("a block that is not there");
  return (*w_cluster)[w_self->block->rank / count * count + rank];
}
inline void w_shared_by(u32 mask, std::function<void()> what) {
  if (mask == 0) w_fail("a mask of no blocks");
  for (u32 i = 0; i < 32; ++i) if (mask >> i & 1) w_as(w_mate(i), what);
}
inline void w_mail_send(u32 to, uint4 v, u32 bar, u32 rank) {  // lands at once: waits are for all of it
  w_as((*w_cluster)[rank], [=] {
    if (to % 16 || to + 16 > w_self->block->shared_bytes) w_fail("mail beyond shared memory");
    memcpy(w_self->block->shared + to, &v, 16);
    Arrivals& b = w_bar(bar);
    b.bytes -= 16;
    w_settle(b);
  });
}
inline void w_mail_wait(u32 at, u32 parity) { w_bar_wait(at, parity); }
inline void w_bar_arrive_at(u32 at, u32 rank) { w_as(w_mate(rank), [=] { w_bar_arrive(at); }); }
inline void w_land(u32 to, u32 place, const void* from, u32 bytes, long long swizzle) {
  u32 at = to + place;
  if (swizzle) at ^= ((at >> 7) & (swizzle / 16 - 1)) << 4;
  if (at + bytes > w_self->block->shared_bytes) w_fail("copy beyond shared memory");
  if (from) memcpy(w_self->block->shared + at, from, bytes); else memset(w_self->block->shared + at, 0, bytes);
}
inline void w_land_tf32(u32 to, u32 place, const void* from, long long swizzle) {  // the engine rounds
  float x = 0.0f;
  if (from) memcpy(&x, from, 4);
  const u32 rounded = w_tf32(x);
  w_land(to, place, &rounded, 4, swizzle);
}
inline void w_later(u32 bar, std::function<void()> copy) {
  if (w_defer == 1) w_bar(bar).late.push_back(copy); else copy();
}
inline void w_box(const w_map* m, u32 to, u32 bar, std::vector<int> x) {
  const w_record& r = *m->r;
  if ((long long)x.size() != r.rank) w_fail("coordinates of another rank");
  if (to % (r.swizzle ? 8 * r.swizzle : 128)) w_fail("misaligned box");
  Thread* const self = w_self;
  x.resize(5, 0);
  w_later(bar, [=, &r] {
    Thread* const now = w_self;
    w_self = self;
    long long count[5], total = 1;
    for (int i = 0; i < 5; ++i) total *= count[i] = i < r.rank ? (r.box[i] + r.steps[i] - 1) / r.steps[i] : 1;
    u32 place = 0;
    for (long long e = 0; e < total; ++e, place += r.size) {
      long long left = e, at = r.address;
      bool inside = true;
      for (int i = 0; i < r.rank; ++i) {
        const long long c = x[i] + left % count[i] * (i ? r.steps[i] : 1);
        left /= count[i];
        inside &= c >= 0 && c < r.sizes[i];
        at += c * (i ? r.strides[i] : r.size);
      }
      bool known = !inside;
      for (auto& b : w_buffers) known |= (const char*)at >= b.first && (const char*)at + r.size <= b.second;
      if (!known) w_fail("box beyond every buffer");
      const void* const from = inside ? (const void*)at : nullptr;
      if (r.size == 4) w_land_tf32(to, place, from, r.swizzle); else w_land(to, place, from, r.size, r.swizzle);
    }
    Arrivals& b = w_bar(bar);
    b.bytes -= total * r.size;
    w_settle(b);
    w_self = now;
  });
}
inline void w_tma(const w_map* m, u32 to, u32 bar, int x, int y) { w_box(m, to, bar, {x, y}); }
inline void w_tma(const w_map* m, u32 to, u32 bar, int x, int y, int z) { w_box(m, to, bar, {x, y, z}); }
inline void w_tma(const w_map* m, u32 to, u32 bar, int x, int y, int z, int u) { w_box(m, to, bar, {x, y, z, u}); }
inline void w_tma(const w_map* m, u32 to, u32 bar, int x, int y, int z, int u, int v) {
  w_box(m, to, bar, {x, y, z, u, v});
}
inline void w_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
  if (to % 16 || (size_t)from % 16 || bytes % 16) w_fail("misaligned copy");
  bool known = false;
  for (auto& b : w_buffers) known |= (const char*)from >= b.first && (const char*)from + bytes <= b.second;
  if (!known) w_fail("copy from outside of every buffer");
  Thread* const self = w_self;
  w_later(bar, [=] {
    Thread* const now = w_self;
    w_self = self;
    w_land(to, 0, from, bytes, 0);
    Arrivals& b = w_bar(bar);
    b.bytes -= bytes;
    w_settle(b);
    w_self = now;
  });
}
// results that TMA stores: read as late as the kernel's waits allow
inline void w_matrices_store(u32 at, const u32 (&r)[4]) {
  Warp& w = *w_self->warp;
  const unsigned slot = w.bar.generation & 1, lane = w_self->lane;
  w.at[slot][lane] = at;
  w_meet(w.bar);
  for (unsigned i = 0; i < 4; ++i) memcpy(w_at(w.at[slot][8 * i + lane / 4]) + lane % 4 * 4, &r[i], 4);
  w_meet(w.bar);
}
static std::map<Thread*, std::deque<std::vector<std::function<void()>>>> w_sent;
static std::map<Thread*, std::vector<std::function<void()>>> w_sending;
inline void w_store_box(const w_map* m, u32 from, std::vector<int> x) {
  const w_record& r = *m->r;
  if ((long long)x.size() != r.rank) w_fail("coordinates of another rank");
  if (from % (r.swizzle ? 8 * r.swizzle : 128)) w_fail("misaligned box");
  x.resize(5, 0);
  unsigned char* const shared = w_self->block->shared;
  const u32 bytes = w_self->block->shared_bytes;
  auto copy = [=, &r] {
    long long total = 1;
    for (int i = 0; i < r.rank; ++i) total *= r.box[i];
    u32 place = from;
    for (long long e = 0; e < total; ++e, place += r.size) {
      long long left = e, at = r.address;
      bool inside = true;
      for (int i = 0; i < r.rank; ++i) {
        const long long c = x[i] + left % r.box[i];
        left /= r.box[i];
        inside &= c >= 0 && c < r.sizes[i];
        at += c * (i ? r.strides[i] : r.size);
      }
      u32 source = place;
      if (r.swizzle) source ^= ((source >> 7) & (r.swizzle / 16 - 1)) << 4;
      if (source + r.size > bytes) w_fail("store from beyond shared memory");
      if (!inside) continue;
      bool known = false;
      for (auto& b : w_buffers) known |= (const char*)at >= b.first && (const char*)at + r.size <= b.second;
      if (!known) w_fail("store beyond every buffer");
      memcpy((void*)at, shared + source, r.size);
    }
  };
  if (w_defer) w_sending[w_self].push_back(copy); else copy();
}
inline void w_stores_commit() {
  w_sent[w_self].push_back(std::move(w_sending[w_self]));
  w_sending[w_self].clear();
}
template <int N> inline void w_stores_read() {
  auto& groups = w_sent[w_self];
  for (; groups.size() > N; groups.pop_front())
    for (auto& copy : groups.front()) copy();
}
inline void w_stores_done() { w_stores_read<0>(); }
inline void w_tma_store(const w_map* m, u32 from, int x, int y) { w_store_box(m, from, {x, y}); }
inline void w_tma_store(const w_map* m, u32 from, int x, int y, int z) { w_store_box(m, from, {x, y, z}); }
inline void w_tma_store(const w_map* m, u32 from, int x, int y, int z, int u) { w_store_box(m, from, {x, y, z, u}); }
inline void w_tma_store(const w_map* m, u32 from, int x, int y, int z, int u, int v) {
  w_store_box(m, from, {x, y, z, u, v});
}
inline void w_raise(unsigned* flag) {
  if (*flag) w_fail("a flag that is up is raised");
  *flag = 1;
  ++w_progress;
}
inline void w_await(unsigned* flag) {
  while (!*flag) w_yield();
  *flag = 0;
  ++w_progress;
}
inline void w_tma_shared(const w_map* m, u32 to, u32 bar, u32 mask, int x, int y) {
  w_shared_by(mask, [=] { w_box(m, to, bar, {x, y}); });
}
inline void w_tma_shared(const w_map* m, u32 to, u32 bar, u32 mask, int x, int y, int z) {
  w_shared_by(mask, [=] { w_box(m, to, bar, {x, y, z}); });
}
inline void w_tma_shared(const w_map* m, u32 to, u32 bar, u32 mask, int x, int y, int z, int u) {
  w_shared_by(mask, [=] { w_box(m, to, bar, {x, y, z, u}); });
}
inline void w_tma_shared(const w_map* m, u32 to, u32 bar, u32 mask, int x, int y, int z, int u, int v) {
  w_shared_by(mask, [=] { w_box(m, to, bar, {x, y, z, u, v}); });
}
inline void w_bulk_shared(u32 to, const void* from, u32 bytes, u32 bar, u32 mask) {
  w_shared_by(mask, [=] { w_bulk(to, from, bytes, bar); });
}
// element `k` (0 to 15) of row `row` of an operand. Source: PTX ISA, canonical layouts of wgmma operands
inline float w_element(u64 d, int row, int k, bool turned, float2 (*unpack)(u32)) {
  const u32 start = (u32)(d & 0x3fff) << 4, leading = (u32)(d >> 16 & 0x3fff) << 4, stride = (u32)(d >> 32 & 0x3fff) << 4;
  const u32 mode = (u32)(d >> 62), line = mode == 1 ? 128 : mode == 2 ? 64 : 32, mask = line / 16 - 1;
  if (mode == 0) w_fail("an operand without swizzle");
  u32 at;
  if (turned) at = start + row / (line / 2) * leading + k / 8 * stride + k % 8 * line + row % (line / 2) * 2;
  else at = start + row / 8 * stride + row % 8 * line + k * 2;
  at ^= ((at >> 7) & mask) << 4;
  if (at + 2 > w_self->block->shared_bytes) w_fail("warpgroup product beyond shared memory");
  u16 x;
  memcpy(&x, w_self->block->shared + at, 2);
  return unpack(x).x;
}
inline float w_element_tf32(u64 d, int row, int k) {  // element `k` (0 to 7), what is beyond TF32 ignored
  const u32 start = (u32)(d & 0x3fff) << 4, stride = (u32)(d >> 32 & 0x3fff) << 4, mode = (u32)(d >> 62);
  const u32 line = mode == 1 ? 128 : mode == 2 ? 64 : 32, mask = line / 16 - 1;
  if (mode == 0) w_fail("an operand without swizzle");
  u32 at = start + row / 8 * stride + row % 8 * line + k * 4, x;
  at ^= ((at >> 7) & mask) << 4;
  if (at + 4 > w_self->block->shared_bytes) w_fail("warpgroup product beyond shared memory");
  memcpy(&x, w_self->block->shared + at, 4);
  return w_cut_tf32(x);
}
inline void w_by_descriptor_tf32(const Product& p) {
  const int lane = w_self->lane, warp = w_self->index.x / 32 % 4;
  for (int j = 0; j < p.half; ++j) {
    const int row = warp * 16 + lane / 4 + (j / 2 % 2) * 8, col = j / 4 * 8 + lane % 4 * 2 + j % 2;
    float sum = p.add ? p.d[j] : 0.0f;
    for (int k = 0; k < 8; ++k) sum += w_element_tf32(p.a, row, k) * w_element_tf32(p.b, col, k);
    p.d[j] = sum;
  }
}
template <int H> inline void w_product_tf32_00(float (&d)[H], u64 a, u64 b, int add) {
  const Product p{d, H, a, b, add, nullptr, w_by_descriptor_tf32};
  if (w_defer) w_self->issued.push_back(p); else w_do(p);
}
template <int A, int B> inline void w_by_descriptor(const Product& p) {
  const int lane = w_self->lane, warp = w_self->index.x / 32 % 4;
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + lane / 4 + h * 8;
    float x[16];
    for (int k = 0; k < 16; ++k) x[k] = w_element(p.a, row, k, A, p.unpack);
    for (int j = 2 * h; j < p.half; j += 4)
      for (int e = 0; e < 2; ++e) {
        const int col = j / 4 * 8 + lane % 4 * 2 + e;
        float sum = p.add ? p.d[j + e] : 0.0f;
        for (int k = 0; k < 16; ++k) sum += x[k] * w_element(p.b, col, k, B, p.unpack);
        p.d[j + e] = sum;
      }
  }
}
#define W_PRODUCT(T, A, B) \
  template <int H> inline void w_product_##T##_##A##B(float (&d)[H], u64 a, u64 b, int add) { \
    const Product p{d, H, a, b, add, w_unpack_##T, w_by_descriptor<A, B>}; \
    if (w_defer) w_self->issued.push_back(p); else w_do(p); \
  }
W_PRODUCT(f16, 0, 0) W_PRODUCT(f16, 0, 1) W_PRODUCT(f16, 1, 0) W_PRODUCT(f16, 1, 1)
W_PRODUCT(bf16, 0, 0) W_PRODUCT(bf16, 0, 1) W_PRODUCT(bf16, 1, 0) W_PRODUCT(bf16, 1, 1)
// attention by warpgroups: weights in registers are the left operand, values the turned right one
struct Weighted { float a[16][16]; };
static std::deque<Weighted> w_left;  // of products of this launch
inline void w_by_registers(const Product& p) {
  const Weighted& x = *(const Weighted*)p.a;
  const int lane = w_self->lane;
  for (int j = 0; j < p.half; ++j) {
    const int row = lane / 4 + (j / 2 % 2) * 8, col = j / 4 * 8 + lane % 4 * 2 + j % 2;
    float sum = p.d[j];
    for (int k = 0; k < 16; ++k) sum += x.a[row][k] * w_element(p.b, col, k, true, p.unpack);
    p.d[j] = sum;
  }
}
template <int H> inline void w_weighted_rs(float (&d)[H], const u32 (&a)[4], u64 b, float2 (*unpack)(u32)) {
  Warp& w = *w_self->warp;
  const unsigned slot = w.bar.generation & 1, lane = w_self->lane;
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack(a[i]);
    w.fa[slot][lane][2 * i] = v.x, w.fa[slot][lane][2 * i + 1] = v.y;
  }
  w_meet(w.bar);
  w_left.emplace_back();
  Weighted& x = w_left.back();
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      x.a[row][k] = w.fa[slot][(row & 7) * 4 + (k & 7) / 2][2 * ((row >> 3) + 2 * (k >> 3)) + (k & 1)];
  const Product p{d, H, (u64)&x, b, 1, unpack, w_by_registers};
  if (w_defer) w_self->issued.push_back(p); else w_do(p);
}
template <int H> inline void w_weighted_f16(float (&d)[H], const u32 (&a)[4], u64 b) {
  w_weighted_rs(d, a, b, w_unpack_f16);
}
template <int H> inline void w_weighted_bf16(float (&d)[H], const u32 (&a)[4], u64 b) {
  w_weighted_rs(d, a, b, w_unpack_bf16);
}
// a left operand in registers, of the 16 rows of its warp
template <bool Turned> inline void w_by_rows(const Product& p) {
  const Weighted& x = *(const Weighted*)p.a;
  const int lane = w_self->lane;
  for (int j = 0; j < p.half; ++j) {
    const int row = lane / 4 + (j / 2 % 2) * 8, col = j / 4 * 8 + lane % 4 * 2 + j % 2;
    float sum = p.add ? p.d[j] : 0.0f;
    for (int k = 0; k < 16; ++k) sum += x.a[row][k] * w_element(p.b, col, k, Turned, p.unpack);
    p.d[j] = sum;
  }
}
template <bool Turned, int H>
inline void w_rows_rs(float (&d)[H], const u32 (&a)[4], u64 b, int add, float2 (*unpack)(u32)) {
  w_weighted_rs(d, a, b, unpack);
  if (!w_defer) w_fail("products of registers are emulated late");
  Product& p = w_self->issued.back();
  p.add = add, p.how = w_by_rows<Turned>;
}
#define W_ROWS(T, B) \
  template <int H> inline void w_product_##T##_r##B(float (&d)[H], const u32 (&a)[4], u64 b, int add) { \
    w_rows_rs<B>(d, a, b, add, w_unpack_##T); \
  }
W_ROWS(f16, 0) W_ROWS(f16, 1) W_ROWS(bf16, 0) W_ROWS(bf16, 1)
template <int N> inline void w_hold(float (&)[N]) {}
inline int w_unknown(int x) { return x; }
inline bool w_any_lane(bool x) {
  unsigned any = x;
  for (int mask = 1; mask < 32; mask *= 2) any |= w_shfl_word(any, mask);
  return any;
}
inline u32 w_read_acquired(const u32* p) {
  if (!*p) w_fail("waits for what a later block says");
  return *p;
}
inline void w_write_released(u32* p, u32 x) { *p = x; }
