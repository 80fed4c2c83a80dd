// Cross-CTA reductions through global memory, with a grid barrier: see moments.py. Stands behind weft_cuda_moments.h.
#ifdef __CUDA_ARCH__  // on the host the emulated machine has these
// Counts; the counter is 0 again after `total`.
W_FN unsigned w_count(unsigned* counter, unsigned total) { return atomicInc(counter, total - 1u); }
// Two words at once: nobody sees one without the other.
W_FN void w_put_pair(unsigned* p, unsigned long long x) {
  asm volatile("st.relaxed.gpu.b64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
W_FN unsigned long long w_take_pair(const unsigned* p) {
  unsigned long long x;
  asm volatile("ld.relaxed.gpu.b64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
// Before words are read again that were not there.
W_FN void w_again() {}
W_FN bool w_any_lane(bool x) { return __any_sync(0xffffffffu, x); }
W_FN void w_least_shared(unsigned* p, unsigned x) { atomicMin(p, x); }
// Behind what is stored first comes what is stored next: the compiler would put all stores behind all arithmetic.
W_FN void w_in_turn() { __syncwarp(); }
// A value that the compiler does not follow.
W_FN unsigned w_opaque(unsigned x) {
  unsigned y;
  asm volatile("mov.u32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
#endif
#define W_PATIENCE 64  // times that words are read again: some 50 us
// What was read at once and has waited as it was.
template <class T, int N> W_FN void w_open(const w_chunk<2 * N>& c, w_f32 (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = w_part((unsigned)c.x[i / 2], i % 2, (const T*)0);
}
// A pair of numbers that is not 0, which means that there is none: all bits turned, one of the NaNs being another.
W_FN unsigned w_turned(w_f32 x) { return x == x ? ~w_bits<unsigned>(x) : 0x80000000u; }
W_FN unsigned long long w_pair(w_f32 x, w_f32 y) { return (unsigned long long)w_turned(y) << 32 | w_turned(x); }
W_FN w_f32 w_first(unsigned long long pair) { return w_bits<w_f32>(~(unsigned)pair); }
W_FN w_f32 w_second(unsigned long long pair) { return w_bits<w_f32>(~(unsigned)(pair >> 32)); }
// Sums of K parts of each of the lanes that stand a multiple of EVERY apart, about `m`, a mean of one of them: what is
// lost by that is at most as many roundings as there are parts.
template <int EVERY, int K>
W_FN void w_about(w_f32 m, const w_f32 (&ns)[K], const w_f32 (&ms)[K], const w_f32 (&qs)[K], w_f32& a, w_f32& b) {
  a = 0.0f, b = 0.0f;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const w_f32 off = ms[k] - m, n = ns[k] * off;
    a += n, b += qs[k] + n * off;
  }
  a = w_sum_lanes<EVERY>(a), b = w_sum_lanes<EVERY>(b);
}
// Where a block of THREADS with ROWS rows each, of BESIDE threads beside each other, keeps what GROUP blocks have.
template <int THREADS, int ROWS, int BESIDE, int GROUP> struct w_desk {
  static constexpr int WARPS = THREADS / 32, EVERY = ROWS * BESIDE, SLOTS = 32 / EVERY;
  static constexpr int WANTED = (GROUP * EVERY + 127) / 128, READERS = WANTED < WARPS ? WANTED : WARPS;
  w_f32 parts[2 * WARPS * EVERY], shifts[WARPS * EVERY], counts[2 * WARPS], last[2 * EVERY], read[2 * READERS * EVERY];
  unsigned missing;
  // Mean of the first warp's elements of a row.
  W_FN w_f32 middle(unsigned row) const {
    const unsigned v = row / ROWS, r = row % ROWS;
    return shifts[v * ROWS + r] + parts[v * (2 * ROWS) + r] * counts[1];
  }
};
// Leaves mean and squares of a part of the rows for the others: a pair per part and row. As `w_moments`.
template <class Role, int THREADS, int ROWS, int BESIDE, int GROUP>
W_FN void w_publish(const Role role, w_desk<THREADS, ROWS, BESIDE, GROUP>& desk, w_f32 (&x)[2 * ROWS], const w_f32 (&shift)[ROWS],
                    w_f32 n, unsigned part, unsigned* slots) {
  typedef w_desk<THREADS, ROWS, BESIDE, GROUP> Desk;
  constexpr int WARPS = Desk::WARPS, EVERY = Desk::EVERY, SLOTS = Desk::SLOTS;
  const unsigned warp = role.thread() / 32u, lane = role.thread() % 32u, at = warp * BESIDE + lane % BESIDE;
  typedef w_fold<2 * ROWS, 16, BESIDE> Fold;
  const unsigned first = Fold::run(role, x);
  n = w_sum_lanes<BESIDE>(n);
#pragma unroll
  for (int i = 0; i < Fold::left; ++i) desk.parts[at * (2 * ROWS) + first + i] = x[i];
  if (lane < BESIDE) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) desk.shifts[at * ROWS + r] = shift[r];
    desk.counts[2 * warp] = n, desk.counts[2 * warp + 1] = w_share_of(n);
  }
  if (role.thread() == 0u) desk.missing = GROUP;
  role.sync();
  if (warp == 0u) {
    constexpr int K = (WARPS + SLOTS - 1) / SLOTS;
    const unsigned row = lane % EVERY, slot = lane / EVERY;
    w_f32 ns[K], ms[K], qs[K], count = 0.0f, a, b;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const unsigned w = slot + k * SLOTS, v = (w < WARPS ? w : 0u) * BESIDE + row / ROWS;
      const w_f32 x = desk.parts[v * (2 * ROWS) + row % ROWS], xx = desk.parts[v * (2 * ROWS) + ROWS + row % ROWS];
      const w_f32 *const c = desk.counts + 2 * (w < WARPS ? w : 0u), off = x * c[1];
      ns[k] = w < WARPS ? c[0] : 0.0f;
      ms[k] = desk.shifts[v * ROWS + row % ROWS] + off;
      qs[k] = w < WARPS ? xx - x * off : 0.0f;
      count += ns[k];
    }
    const w_f32 m = desk.middle(row);
    count = w_sum_lanes<EVERY>(count);
    w_about<EVERY>(m, ns, ms, qs, a, b);
    const w_f32 off = a * w_share_of(count);
    if (slot == 0u) w_put_pair(slots + (part * EVERY + row) * 2u, w_pair(m + off, b - a * off));
  }
}
// Sum and squares about the mean of whole rows of TOTAL elements, of which GROUP blocks have EACH, the last ones less.
// Gives GROUP; or, instead of them, a part that has been missing for long, or this block's own after it has reduced
// another. `left`: in one thread, how many blocks had read before.
template <unsigned EACH, unsigned TOTAL, class Role, int THREADS, int ROWS, int BESIDE, int GROUP>
W_FN unsigned w_meet(const Role role, w_desk<THREADS, ROWS, BESIDE, GROUP>& desk, unsigned part, unsigned own,
                     const unsigned* slots, unsigned* departed, unsigned& left, w_f32 (&sum)[ROWS],
                     w_f32 (&squares)[ROWS]) {
  typedef w_desk<THREADS, ROWS, BESIDE, GROUP> Desk;
  constexpr int EVERY = Desk::EVERY, SLOTS = Desk::SLOTS, READERS = Desk::READERS;
  constexpr unsigned LAST = TOTAL - (GROUP - 1) * EACH;
  static_assert((GROUP - 1) * EACH < TOTAL, "a part is empty");
  const unsigned warp = role.thread() / 32u, lane = role.thread() % 32u, row = lane % EVERY, slot = lane / EVERY;
  w_f32 m, a, b;
  if (warp < READERS) {
    constexpr int STEP = READERS * SLOTS, K = (GROUP + STEP - 1) / STEP;
    w_f32 ns[K], ms[K], qs[K];
    unsigned long long x[K] = {};
    unsigned missing = GROUP;
    m = desk.middle(row);
    for (int tries = 0; tries < W_PATIENCE; ++tries) {
      missing = GROUP;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const unsigned g = warp * SLOTS + slot + k * STEP;
        if (x[k] == 0ull) x[k] = w_take_pair(slots + ((g < GROUP ? g : 0u) * EVERY + row) * 2u);
      }
#pragma unroll
      for (int k = K; k-- > 0;) {
        const unsigned g = warp * SLOTS + slot + k * STEP;
        if (x[k] == 0ull) missing = g < GROUP ? g : 0u;
      }
      if (!w_any_lane(missing != GROUP)) break;
      w_again();
    }
    if (missing != GROUP) w_least_shared(&desk.missing, missing);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const unsigned g = warp * SLOTS + slot + k * STEP;
      ns[k] = g < GROUP - 1 ? (w_f32)EACH : g == GROUP - 1 ? (w_f32)LAST : 0.0f;
      ms[k] = w_first(x[k]);
      qs[k] = g < GROUP ? w_second(x[k]) : 0.0f;
    }
    w_about<EVERY>(m, ns, ms, qs, a, b);
    if (READERS > 1 && slot == 0u) {
      desk.read[warp * (2 * EVERY) + row] = a;
      desk.read[warp * (2 * EVERY) + EVERY + row] = b;
    }
  }
  role.sync();
  const unsigned next = desk.missing != GROUP || part == own ? desk.missing : own;
  if (next != GROUP) {
    role.sync();
    return next;
  }
  if (warp == 0u) {
    if constexpr (READERS > 1) {
      a = 0.0f, b = 0.0f;
#pragma unroll
      for (unsigned w = 0u; w < READERS; w += SLOTS) {
        const unsigned v = (w + slot < READERS ? w + slot : 0u) * (2 * EVERY) + row;
        const bool some = w + slot < READERS;
        a += some ? desk.read[v] : 0.0f, b += some ? desk.read[v + EVERY] : 0.0f;
      }
      a = w_sum_lanes<EVERY>(a), b = w_sum_lanes<EVERY>(b);
    }
    if (slot == 0u) desk.last[row] = m * (w_f32)TOTAL + a, desk.last[EVERY + row] = b - a * (a * (1.0f / (w_f32)TOTAL));
  }
  role.sync();
  left = role.thread() == THREADS - 32 ? w_count(departed, GROUP) : 0u;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    sum[r] = desk.last[lane % BESIDE * ROWS + r];
    squares[r] = desk.last[EVERY + lane % BESIDE * ROWS + r];
  }
  return GROUP;
}
// The block that was the last to read them sets COUNT slots back.
template <int THREADS, int GROUP, int COUNT, class Role>
W_FN void w_leave(const Role role, unsigned* slots, unsigned left) {
  if (role.thread() / 32u != THREADS / 32 - 1 || !w_any_lane(left == GROUP - 1)) return;
  for (unsigned i = role.thread() % 32u; i < COUNT; i += 32u) w_put_pair(slots + i * 2u, 0ull);
}
