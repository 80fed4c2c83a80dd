// Prefixes over the lanes of a warp, and over warps: what came before each lane, and the whole. The order of every
// combination is fixed, so results are equal from run to run.

// Pairs (a, b) stand for h -> a h + b; the earlier one is applied first.
template <class T> struct w_linear {
  T a, b;
  W_FN static w_linear none() { return {(T)1, (T)0}; }
  W_FN w_linear then(w_linear later) const { return {w_times(a, later.a), w_plus(w_times(later.a, b), later.b)}; }
  W_FN w_linear from(int mask) const { return {w_shfl(a, mask), w_shfl(b, mask)}; }
  W_FN T of(T h) const { return w_plus(w_times(a, h), b); }
};
template <class T> struct w_added {
  T b;
  W_FN static w_added none() { return {(T)0}; }
  W_FN w_added then(w_added later) const { return {w_plus(b, later.b)}; }
  W_FN w_added from(int mask) const { return {w_shfl(b, mask)}; }
  W_FN T of(T h) const { return w_plus(h, b); }
};
template <class T> struct w_multiplied {
  T b;
  W_FN static w_multiplied none() { return {(T)1}; }
  W_FN w_multiplied then(w_multiplied later) const { return {w_times(b, later.b)}; }
  W_FN w_multiplied from(int mask) const { return {w_shfl(b, mask)}; }
  W_FN T of(T h) const { return w_times(h, b); }
};

// Of a lane's own `total`: what came before it in its warp; `total` becomes that of the warp.
template <class M> W_FN M w_before(M& total, unsigned lane) {
  M before = M::none();
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    M other = total.from(o);
    if (lane & (unsigned)o) {
      before = other.then(before);
      total = other.then(total);
    } else {
      total = total.then(other);
    }
  }
  return before;
}

// The same over the warps of a block: `totals` has a place for each, which others may read until the next barrier.
template <int WARPS, class M> W_FN M w_before_warps(const M* totals, M before, unsigned warp, M& total) {
  M earlier = M::none();
  total = M::none();
#pragma unroll
  for (int k = 0; k < WARPS; ++k) {
    if ((unsigned)k == warp) earlier = total;
    total = total.then(totals[k]);
  }
  return earlier.then(before);
}
