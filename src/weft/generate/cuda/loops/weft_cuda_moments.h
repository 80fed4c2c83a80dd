// Means and squares about them, joined over the threads of a block and the blocks of a cluster: see moments.py.
#ifdef __CUDA_ARCH__  // on the host the emulated machine has these
// Says that this block has started; `w_cluster_wait` returns when all have.
W_FN void w_cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
W_FN void w_cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Puts a word to the same place of another block's shared memory.
W_FN void w_cluster_put(const w_f32* p, unsigned rank, w_f32 x) {
#if __CUDA_ARCH__ >= 900
  unsigned at = (unsigned)__cvta_generic_to_shared(p), there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
#endif
}
#endif
W_FN w_f32 w_middle(w_f32 a, w_f32 b, w_f32 c) {
  const w_f32 low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c > high ? high : c;
}
// 1 / n within a unit in the last place; 0 for nothing.
W_FN w_f32 w_share_of(w_f32 n) {
#ifdef __CUDA_ARCH__
  w_f32 y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(n));
  return n > 0.0f ? y : 0.0f;
#else
  return n > 0.0f ? 1.0f / n : 0.0f;
#endif
}
// Sums of V values over the lanes that differ in the bits from LOW to M: each lane is left with some of the sums, of
// which `run` gives the first's number.
template <int V, int M, int LOW> struct w_fold {
  static constexpr int left = M < LOW ? V : w_fold<(V > 1 ? V / 2 : 1), (M < LOW ? 0 : M / 2), LOW>::left;
  template <class Role, int N> W_FN static unsigned run(const Role role, w_f32 (&x)[N]) {
    if constexpr (M < LOW) {
      return 0u;
    } else if constexpr (V == 1) {
      x[0] += w_shfl(x[0], M);
      return w_fold<1, M / 2, LOW>::run(role, x);
    } else {
      const bool upper = (role.thread() & (unsigned)M) != 0u;
#pragma unroll
      for (int i = 0; i < V / 2; ++i) {
        w_f32 mine = upper ? x[i + V / 2] : x[i], other = upper ? x[i] : x[i + V / 2];
        x[i] = mine + w_shfl(other, M);
      }
      return (upper ? V / 2 : 0u) + w_fold<V / 2, M / 2, LOW>::run(role, x);
    }
  }
};
template <int V, int LOW> struct w_fold<V, 0, LOW> {
  static constexpr int left = V;
  template <class Role, int N> W_FN static unsigned run(const Role, w_f32 (&)[N]) { return 0u; }
};
template <int LOW> W_FN w_f32 w_sum_lanes(w_f32 x) {
#pragma unroll
  for (int o = LOW; o < 32; o *= 2) x += w_shfl(x, o);
  return x;
}
// Joins K parts of each of the lanes that stand a multiple of EVERY apart.
template <int EVERY, int K>
W_FN void w_join(const w_f32 (&n)[K], const w_f32 (&m)[K], const w_f32 (&q)[K], w_f32& count, w_f32& sum, w_f32& mean,
                 w_f32& squares) {
  count = 0.0f, sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int k = 0; k < K; ++k) count += n[k], sum += n[k] * m[k];
  count = w_sum_lanes<EVERY>(count), sum = w_sum_lanes<EVERY>(sum);
  mean = sum * w_share_of(count);
#pragma unroll
  for (int k = 0; k < K; ++k) squares += q[k] + n[k] * (m[k] - mean) * (m[k] - mean);
  squares = w_sum_lanes<EVERY>(squares);
}
// ROWS rows of each thread, of BESIDE threads beside each other: sums about `shift`, their squares, how many.
// Leaves sum and squares about the mean of the whole row. `memory`: w_moments_words floats.
template <int THREADS, int ROWS, int BESIDE, int CLUSTER, class Role>
W_FN void w_moments(const Role role, w_f32 (&x)[2 * ROWS], const w_f32 (&shift)[ROWS], w_f32 n, unsigned rank, w_f32* memory,
                    w_f32 (&sum)[ROWS], w_f32 (&squares)[ROWS]) {
  constexpr int WARPS = THREADS / 32, EVERY = ROWS * BESIDE, SLOTS = 32 / EVERY;
  w_f32 *parts = memory, *shifts = parts + 2 * WARPS * EVERY, *counts = shifts + WARPS * EVERY;
  w_f32 *last = counts + (2 * WARPS + 3) / 4 * 4, *peers = last + 2 * EVERY;
  const unsigned warp = role.thread() / 32u, lane = role.thread() % 32u, at = warp * BESIDE + lane % BESIDE;
  typedef w_fold<2 * ROWS, 16, BESIDE> Fold;
  const unsigned first = Fold::run(role, x);
  n = w_sum_lanes<BESIDE>(n);
#pragma unroll
  for (int i = 0; i < Fold::left; ++i) parts[at * (2 * ROWS) + first + i] = x[i];
  if (lane < BESIDE) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) shifts[at * ROWS + r] = shift[r];
    counts[2 * warp] = n, counts[2 * warp + 1] = w_share_of(n);
  }
  if constexpr (CLUSTER > 1) w_cluster_wait();
  role.sync();
  const unsigned row = lane % EVERY, slot = lane / EVERY;
  w_f32 count, total, mean, q;
  if (warp == 0u) {
    constexpr int K = (WARPS + SLOTS - 1) / SLOTS;
    w_f32 ns[K], ms[K], qs[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const unsigned w = slot + k * SLOTS, v = (w < WARPS ? w : 0u) * BESIDE + row / ROWS;
      const w_f32 a = parts[v * (2 * ROWS) + row % ROWS], b = parts[v * (2 * ROWS) + ROWS + row % ROWS];
      const w_f32 *const c = counts + 2 * (w < WARPS ? w : 0u), off = a * c[1];
      ns[k] = w < WARPS ? c[0] : 0.0f;
      ms[k] = shifts[v * ROWS + row % ROWS] + off;
      qs[k] = w < WARPS ? b - a * off : 0.0f;
    }
    w_join<EVERY>(ns, ms, qs, count, total, mean, q);
    if constexpr (CLUSTER == 1) {
      if (slot == 0u) last[row] = total, last[EVERY + row] = q;
    } else {
      const w_f32* mine = peers + rank * (3 * EVERY) + row;
#pragma unroll
      for (unsigned c = 0u; c < CLUSTER; c += SLOTS) {
        if (c + slot < CLUSTER) {
          w_cluster_put(mine, c + slot, count);
          w_cluster_put(mine + EVERY, c + slot, mean);
          w_cluster_put(mine + 2 * EVERY, c + slot, q);
        }
      }
    }
  }
  if constexpr (CLUSTER > 1) {
    w_cluster_sync();
    if (warp == 0u) {
      constexpr int K = (CLUSTER + SLOTS - 1) / SLOTS;
      w_f32 ns[K], ms[K], qs[K];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const unsigned c = slot + k * SLOTS, v = (c < CLUSTER ? c : 0u) * (3 * EVERY) + row;
        ns[k] = c < CLUSTER ? peers[v] : 0.0f, ms[k] = peers[v + EVERY], qs[k] = c < CLUSTER ? peers[v + 2 * EVERY] : 0.0f;
      }
      w_join<EVERY>(ns, ms, qs, count, total, mean, q);
      if (slot == 0u) last[row] = total, last[EVERY + row] = q;
    }
  }
  role.sync();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    sum[r] = last[lane % BESIDE * ROWS + r];
    squares[r] = last[EVERY + lane % BESIDE * ROWS + r];
  }
}
