// Several roles in one CTA: where each runs, and how best-effort roles draw their blocks. Stands behind weft_cuda_role.h.
// Includes nothing. Tests put an emulation in the place of what names the machine.
#ifdef __CUDA_ARCH__
// Numbers and counts of named barriers stand in the instruction: a number in a register reserves all 16.
template <int ID, int N> W_FN void w_barrier() { asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(ID), "n"(N) : "memory"); }
template <int ID> W_FN void w_barrier_of(int n) { asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(ID), "r"(n) : "memory"); }
template <int ID, int N> W_FN void w_barrier_arrive() {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"n"(ID), "n"(N) : "memory");
}
template <int ID> W_FN void w_barrier_arrive_of(int n) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"n"(ID), "r"(n) : "memory");
}
// Whether any thread says so, and how many do. Lanes of a warp may meet at different places of the text.
template <int ID, int N> W_FN bool w_barrier_or(bool x) {
  unsigned r;
  asm volatile("{ .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n barrier.cta.red.or.pred q, %2, %3, p;\n selp.u32 %0, 1, 0, q; }"
               : "=r"(r) : "r"((unsigned)x), "n"(ID), "n"(N) : "memory");
  return r != 0;
}
template <int ID, int N> W_FN int w_barrier_count(bool x) {
  int r;
  asm volatile("{ .reg .pred p;\n setp.ne.u32 p, %1, 0;\n barrier.cta.red.popc.u32 %0, %2, %3, p; }"
               : "=r"(r) : "r"((unsigned)x), "n"(ID), "n"(N) : "memory");
  return r;
}
// the same, of all threads of the CTA
W_FN bool w_barrier_or_all(bool x) {
  unsigned r;
  asm volatile("{ .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n barrier.cta.red.or.pred q, 0, p;\n selp.u32 %0, 1, 0, q; }"
               : "=r"(r) : "r"((unsigned)x) : "memory");
  return r != 0;
}
W_FN int w_barrier_count_all(bool x) {
  int r;
  asm volatile("{ .reg .pred p;\n setp.ne.u32 p, %1, 0;\n barrier.cta.red.popc.u32 %0, 0, p; }"
               : "=r"(r) : "r"((unsigned)x) : "memory");
  return r;
}
W_FN unsigned w_grid_y() { return gridDim.y; }
W_FN unsigned w_grid_z() { return gridDim.z; }
W_FN void w_all_threads() { __syncthreads(); }
// Memory that other CTAs write, too.
W_FN unsigned w_peek(const unsigned* p) {
  unsigned x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
W_FN unsigned long long w_peek(const unsigned long long* p) {
  unsigned long long x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
W_FN void w_poke(unsigned* p, unsigned x) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
W_FN void w_publish(unsigned* p, unsigned x) {  // with all that was written before
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
W_FN unsigned long long w_take(unsigned long long* p, unsigned long long n) {
  unsigned long long x;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(x) : "l"(p), "l"(n) : "memory");
  return x;
}
W_FN unsigned w_report(unsigned* p, unsigned n) {  // with all that was written before
  unsigned x;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;" : "=r"(x) : "l"(p), "r"(n) : "memory");
  return x;
}
W_FN bool w_exchange(unsigned long long* p, unsigned long long from, unsigned long long to) {  // where it is `from`
  unsigned long long x;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(x) : "l"(p), "l"(from), "l"(to) : "memory");
  return x == from;
}
W_FN void w_settled() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// A word of shared memory that other warps of the CTA change.
W_FN unsigned w_seen(const unsigned* p) { return *(const volatile unsigned*)p; }
W_FN unsigned w_warp_ended(unsigned* p) {  // in its first lane: how many there are now
  __syncwarp();
  return (threadIdx.x & 31u) == 0 ? atomicAdd(p, 1u) + 1u : 0u;
}
W_FN void w_tell(unsigned* p) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory"); }
W_FN void w_pause(unsigned ns) { __nanosleep(ns); }
// A number that the compiler does not know: where it knows the grid, loops over tiles were seen to come out slower.
W_FN unsigned w_told(unsigned x) {
  unsigned y;
  asm("mov.u32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
W_FN unsigned w_sm() {
  unsigned x;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(x));
  return x;
}
W_FN unsigned long long w_now() { return (unsigned long long)clock64(); }
#if __CUDA_ARCH__ >= 900
// LC's threads of a cluster meet at barriers in shared memory, two in each CTA, since barrier.cluster waits for all threads
// of the cluster. They are used in turn: a warp that is ahead may arrive for the next meeting before others' arrivals for
// this one have come to a CTA. All threads begin; WARPS are LC's of a CTA.
template <unsigned WARPS, unsigned CTAS> W_FN void w_cluster_begin(const unsigned char* p) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(p);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(WARPS * CTAS) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at + 8), "r"(WARPS * CTAS) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
W_FN unsigned w_barrier_phase(unsigned at) {  // parity of the phase that is not complete: it waits for the calling warp
  unsigned done;
  asm volatile("{ .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0;\n selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(at) : "memory");
  return done;
}
template <unsigned WARPS, unsigned CTAS> W_FN void w_cluster_meet(const unsigned char* p) {
  const unsigned first = (unsigned)__cvta_generic_to_shared(p), lane = threadIdx.x & 31u;
  const unsigned a = w_barrier_phase(first), b = w_barrier_phase(first + 8);  // alike before an even meeting
  const unsigned at = a == b ? first : first + 8, parity = a == b ? a : b;
  __syncwarp();
  if (lane < CTAS)
    asm volatile("{ .reg .b32 r;\n mapa.shared::cluster.u32 r, %0, %1;\n"
                 " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r]; }" ::"r"(at), "r"(lane) : "memory");
  unsigned done;
  do {
    asm volatile("{ .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(at), "r"(parity) : "memory");
  } while (!done);
}
#endif
#endif
// ---- where a role runs
// A role of THREADS threads from FIRST on: its barriers are BARRIER, which is `sync()`, and NAMED further ones. The last
// IDLE threads are lent to another role when they have passed through: they wait for no kernel before.
template <unsigned FIRST, unsigned THREADS, int BARRIER, int NAMED, unsigned IDLE = 0> struct w_in_cta {
  static W_FN unsigned thread() { return threadIdx.x - FIRST; }
  static W_FN unsigned block_x() { return blockIdx.x; }
  static W_FN unsigned block_y() { return blockIdx.y; }
  static W_FN unsigned block_z() { return blockIdx.z; }
  static W_FN unsigned blocks_x() { return gridDim.x; }
  static W_FN unsigned blocks_y() { return w_grid_y(); }
  static W_FN unsigned blocks_z() { return w_grid_z(); }
  static W_FN void sync() { w_barrier<BARRIER, THREADS>(); }
  static W_FN bool any(bool x) { return w_barrier_or<BARRIER, THREADS>(x); }
  static W_FN int count(bool x) { return w_barrier_count<BARRIER, THREADS>(x); }
  template <int I> static W_FN void meet(int number, int n) {
    if constexpr (I < NAMED) {
      if (number == I) w_barrier_of<BARRIER + 1 + I>(n);
      else meet<I + 1>(number, n);
    }
  }
  template <int I, int N> static W_FN void meet(int number, w_threads<N> n) {
    if constexpr (I < NAMED) {
      if (number == I) w_barrier<BARRIER + 1 + I, N>();
      else meet<I + 1>(number, n);
    }
  }
  template <int I> static W_FN void arrive(int number, int n) {
    if constexpr (I < NAMED) {
      if (number == I) w_barrier_arrive_of<BARRIER + 1 + I>(n);
      else arrive<I + 1>(number, n);
    }
  }
  template <int I, int N> static W_FN void arrive(int number, w_threads<N> n) {
    if constexpr (I < NAMED) {
      if (number == I) w_barrier_arrive<BARRIER + 1 + I, N>();
      else arrive<I + 1>(number, n);
    }
  }
  template <class N> static W_FN void named_barrier(int number, N threads) { meet<0>(number, threads); }
  template <class N> static W_FN void named_barrier_arrive(int number, N threads) { arrive<0>(number, threads); }
  static W_FN void pdl_wait() {
    if (IDLE == 0 || threadIdx.x < FIRST + THREADS - IDLE) w_wait();
  }
  static W_FN void pdl_trigger() { w_release(); }
};
// One of several roles of a grid (w_beside in weft_cuda_role.h), where the kernel's only role is BASE.
#define W_BESIDE_IN(BASE) \
  template <unsigned X> struct w_beside : BASE { \
    const unsigned x, y, z; \
    W_FN w_beside(unsigned x, unsigned y, unsigned z) : x(x), y(y), z(z) {} \
    W_FN unsigned block_x() const { return x; } \
    W_FN unsigned block_y() const { return y; } \
    W_FN unsigned block_z() const { return z; } \
    static W_FN unsigned blocks_x() { return X; } \
  };
// A virtual block of a best-effort role: number `block` of a grid of X by Y by Z. It depends on no kernel before.
// LEAVES: threads may leave before a barrier. Every barrier then asks whether any thread is still there; those that left
// answer for themselves in `leave()` until none is. `any` asks twice: a second question tells "none says so" from "none
// is there".
template <unsigned FIRST, unsigned THREADS, int BARRIER, int NAMED, bool LEAVES, unsigned X, unsigned Y, unsigned Z>
struct w_virtual : w_in_cta<FIRST, THREADS, BARRIER, NAMED> {
  typedef w_in_cta<FIRST, THREADS, BARRIER, NAMED> base;
  const unsigned block;
  explicit W_FN w_virtual(unsigned block) : block(block) {}
  W_FN unsigned block_x() const { return Y * Z == 1 ? block : block % X; }
  W_FN unsigned block_y() const { return Z == 1 ? block / X : block / X % Y; }
  W_FN unsigned block_z() const { return block / (X * Y); }
  static W_FN unsigned blocks_x() { return X; }
  static W_FN unsigned blocks_y() { return Y; }
  static W_FN unsigned blocks_z() { return Z; }
  static W_FN void sync() {
    if constexpr (LEAVES) base::any(true);
    else base::sync();
  }
  static W_FN bool any(bool x) {
    const bool r = base::any(x);
    if constexpr (LEAVES) base::any(true);
    return r;
  }
  static W_FN int count(bool x) {
    static_assert(!LEAVES, "a count of threads some of which may have left");
    return base::count(x);
  }
  static W_FN void leave() {
    if constexpr (LEAVES)
      while (base::any(false) || base::any(false)) {
      }
  }
  static W_FN void pdl_wait() {}
  static W_FN void pdl_trigger() {}
};
// The same for blocks without barriers and shared memory, of which a role of fewer threads runs one part after another.
template <unsigned FIRST, unsigned THREADS, int BARRIER, int NAMED, bool LEAVES, unsigned X, unsigned Y, unsigned Z>
struct w_folded : w_virtual<FIRST, THREADS, BARRIER, NAMED, LEAVES, X, Y, Z> {
  const unsigned at;
  W_FN w_folded(unsigned block, unsigned at) : w_virtual<FIRST, THREADS, BARRIER, NAMED, LEAVES, X, Y, Z>(block), at(at) {}
  W_FN unsigned thread() const { return at; }
};
// What bodies ask that were not written for roles; of a kernel's only role, too.
template <class R> W_FN unsigned w_blocks_y(const R& role) { return role.blocks_y(); }
template <class R> W_FN unsigned w_blocks_z(const R& role) { return role.blocks_z(); }
template <class R> W_FN bool w_any(const R& role, bool x) { return role.any(x); }
template <class R> W_FN int w_count(const R& role, bool x) { return role.count(x); }
W_FN unsigned w_blocks_y(const w_solo&) { return w_grid_y(); }
W_FN unsigned w_blocks_z(const w_solo&) { return w_grid_z(); }
W_FN bool w_any(const w_solo&, bool x) { return w_barrier_or_all(x); }
W_FN int w_count(const w_solo&, bool x) { return w_barrier_count_all(x); }
// ---- which block next
// The work counter (kernels/colocation.py: WorkCounter). `granted` holds `end` below and `ticket` above: one addition
// draws a block and tells whether there was one, and one exchange grants more blocks and forgets the draws in vain, so
// that none is lost when the limit is raised, and none runs twice.
struct w_work {
  unsigned long long granted;
  unsigned limit, open, stage, finished, stop, duty, sms, ctas;
  unsigned long long begun;  // of kernels that fill their grid: BE roles so far, and CTAs whose LC role has ended
  unsigned lc_ended, lc_clocks, be_clocks, period;
};
struct w_drawn { unsigned stage, block; };
enum : unsigned { W_NONE = 0xffffffffu, W_AGAIN = 0xfffffffeu };  // no block; none yet: to be drawn once more
// What the thread that draws knows: `open` and `stage` of the blocks below `end`. It counts blocks that have ended
// together: each count waits until all that was written is visible.
struct w_hand {
  unsigned end = 0, open = 0, stage = 0, begin = 0, uncounted = 0, lc_ends = 0;
  bool knows = false, drew = false, stopped = false;
  unsigned stop = 0, body_began = 0, body_clocks = 0;
  unsigned began = 0, block_began = 0, lc_clocks = 0, be_clocks = 0, ran = 0;
};
// Whether BE's drawing ends when LC has ended in its own CTA, or in all LCS CTAs of a grid of ROLES BE roles.
struct w_any_time {
  static W_FN void start(w_hand&) {}
  static W_FN void ran(w_hand&) {}
  static W_FN void end(w_work*, const w_hand&) {}
  static W_FN bool late(const w_hand&, unsigned) { return false; }
};
struct w_own_cta : w_any_time {
  static W_FN void begin(w_work*, w_hand&) {}
  static W_FN bool over(w_work*, const w_hand&) { return true; }
};
template <unsigned LCS, unsigned ROLES> struct w_whole_grid : w_any_time {
  static W_FN void begin(w_work* work, w_hand& h) {  // launches follow each other: roles are numbered through them
    h.lc_ends = (unsigned)(w_take(&work->begun, 1ull) / ROLES + 1ull) * LCS;
  }
  static W_FN bool over(w_work* work, const w_hand& h) { return (int)(w_peek(&work->lc_ended) - h.lc_ends) >= 0; }
};
enum : unsigned { W_COUNTED_TOGETHER = 8 };
// Blocks are drawn only if they would end before LC does, by the clocks of launches before. Clocks are of one
// multiprocessor, modulo 2^32.
template <class END> struct w_in_time : END {
  static W_FN void begin(w_work* work, w_hand& h) {
    END::begin(work, h);
    h.began = (unsigned)w_now();
    h.lc_clocks = w_peek(&work->lc_clocks), h.be_clocks = w_peek(&work->be_clocks);
  }
  static W_FN void start(w_hand& h) { h.block_began = (unsigned)w_now(); }
  static W_FN void ran(w_hand& h) {
    const unsigned clocks = (unsigned)w_now() - h.block_began, before = h.be_clocks - h.be_clocks / 8u;
    h.be_clocks = clocks > before ? clocks : before;
    ++h.ran;
  }
  // whether so many blocks from now on would be too many
  static W_FN bool late(const w_hand& h, unsigned blocks) {
    const unsigned long long end = (unsigned long long)((unsigned)w_now() - h.began) + (unsigned long long)blocks * h.be_clocks;
    return h.lc_clocks != 0 && end > h.lc_clocks;
  }
  // What nobody tries is forgotten by and by, lest one long block keeps all later ones out.
  static W_FN void end(w_work* work, const w_hand& h) {
    if (h.ran != 0) w_poke(&work->be_clocks, h.be_clocks);
    else if (blockIdx.x == 0) w_poke(&work->be_clocks, h.be_clocks - h.be_clocks / 8u);
  }
};
// Counts the blocks that have ended since the last time; the last of a stage opens the next.
template <class JOB> W_FN void w_count_ended(w_work* work, w_hand& h) {
  const unsigned n = h.uncounted;
  if (n == 0) return;
  h.uncounted = 0;
  if (w_report(&work->finished, n) + n != h.open) return;
  w_settled();
  unsigned next = h.stage;
  do next = next + 1u == JOB::stages ? 0u : next + 1u; while (JOB::blocks(next) == 0);
  w_poke(&work->stage, next);
  w_publish(&work->open, h.open + JOB::blocks(next));
}
// A block that all threads of its role have ended, by one of them.
template <class JOB> W_FN void w_finish(w_work* work, w_hand& h) {
  if (++h.uncounted == W_COUNTED_TOGETHER) w_count_ended<JOB>(work, h);
}
// Takes over a block that was drawn: what its stage is, and which of its blocks it is.
template <class JOB> W_FN w_drawn w_taken(w_work* work, w_hand& h, unsigned end, unsigned ticket) {
  if (!h.knows || end != h.end) {
    w_count_ended<JOB>(work, h);
    w_settled();  // what earlier stages wrote is visible behind it, to all threads that meet this one
    h.knows = true, h.end = end;
    h.open = w_peek(&work->open), h.stage = w_peek(&work->stage), h.begin = h.open - JOB::blocks(h.stage);
  }
  return {h.stage, ticket - h.begin};
}
// The next block of a job, or W_NONE where the limit is reached, the latency-critical role ends (`ended` counts its warps
// in this CTA, and comes to WARPS with the first that has no more to do; 0: there is none; END says whether that is
// enough) or the job is told to stop. STAYS: waits for a higher limit.
// A block that is drawn is run to its end, whatever is told in between. Whoever finds none has counted all that it ran.
template <class JOB, unsigned WARPS, bool STAYS, class END = w_own_cta>
W_FN w_drawn w_draw(w_work* work, w_hand& h, const unsigned* ended) {
  const w_drawn none = {W_NONE, 0u};
  if (JOB::total() == 0) return none;
  for (;;) {
    if (WARPS != 0 && w_seen(ended) >= WARPS && END::over(work, h)) break;
    if (END::late(h, 1u)) break;
    const unsigned stop = w_peek(&work->stop);
    unsigned long long word = w_peek(&work->granted);
    if (stop != 0) break;
    if ((int)((unsigned)word - (unsigned)(word >> 32)) > 0) word = w_take(&work->granted, 1ull << 32);
    const unsigned end = (unsigned)word, ticket = (unsigned)(word >> 32);
    h.drew = (int)(end - ticket) > 0;
    if (h.drew) return w_taken<JOB>(work, h, end, ticket);
    // in vain: more is granted up to the limit or the end of the open stage
    w_count_ended<JOB>(work, h);
    const unsigned limit = w_peek(&work->limit), open = w_peek(&work->open);
    const unsigned goal = (int)(limit - open) < 0 ? limit : open;
    if ((int)(goal - end) > 0) {
      word = w_peek(&work->granted);
      if ((unsigned)word == end && (int)(end - (unsigned)(word >> 32)) <= 0) {
        w_settled();
        w_exchange(&work->granted, word, (unsigned long long)end << 32 | goal);
      }
    } else if (STAYS || (int)(limit - end) > 0) {
      w_pause(256);  // blocks of the open stage still run in other CTAs, which wait for nobody
    } else {
      break;
    }
  }
  w_count_ended<JOB>(work, h);
  return none;
}
enum : unsigned { W_LONG_BLOCK = 8192 };  // clocks: some 4 us
// Draws the block after this one while this one runs: the addition before its body, looked at behind it. `stop` is asked
// for at the end of each block. Behind a long block the answer is waited for before the next is drawn, so that one more
// runs when the job is told to stop; behind a short one it is looked at with the next, so that two more may run.
// Where there is no block, W_AGAIN: `w_draw` says why, when all threads have ended the one that runs.
template <class JOB, unsigned WARPS, class END> struct w_ahead {
  unsigned long long word = 0;
  bool asked = false;
  W_FN w_ahead(w_work* work, w_hand& h, const unsigned* ended, bool draws) {
    if (!draws) return;
    END::start(h);
    h.body_began = (unsigned)w_now();
    if (h.body_clocks >= W_LONG_BLOCK) h.stopped = h.stopped || h.stop != 0;
    if (!h.drew || h.stopped || w_seen(ended) >= WARPS || END::late(h, 2u)) return;
    asked = true;
    word = w_take(&work->granted, 1ull << 32);
  }
  W_FN w_drawn found(w_work* work, w_hand& h) const {
    const unsigned end = (unsigned)word, ticket = (unsigned)(word >> 32);
    h.body_clocks = (unsigned)w_now() - h.body_began;
    h.stopped = h.stopped || h.stop != 0;
    h.stop = w_peek(&work->stop);
    h.drew = h.drew && asked && (int)(end - ticket) > 0;
    if (!h.drew) return {W_AGAIN, 0u};
    return w_taken<JOB>(work, h, end, ticket);
  }
};
