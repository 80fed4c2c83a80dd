// Results that are stored to all places which show them: see outward.py.
// Which of OUTER rows (or columns) of a result show each of INNER ones; of those that MOST are too few for, `from` says it.
template <int INNER, int OUTER, int MOST> struct w_shown {
  unsigned count[INNER];
  w_chunk<2 * MOST> at[INNER];
  unsigned short from[OUTER];
  W_FN unsigned place(unsigned i, unsigned k) const { return at[i].x[k / 2] >> (16 * (k % 2)) & 65535u; }
};
template <int THREADS, int INNER, int OUTER, int MOST> W_FN void w_show_none(w_shown<INNER, OUTER, MOST>& s) {
  for (unsigned i = threadIdx.x; i < INNER; i += THREADS) s.count[i] = 0u;
}
template <int INNER, int OUTER, int MOST> W_FN void w_show_at(w_shown<INNER, OUTER, MOST>& s, unsigned o, unsigned i) {
#ifdef __CUDA_ARCH__
  const unsigned k = atomicAdd(&s.count[i], 1u);  // in any order: all of them get the same value
#else
  const unsigned k = s.count[i]++;
#endif
  if (k < MOST) ((unsigned short*)s.at[i].x)[k] = (unsigned short)o;
  s.from[o] = (unsigned short)i;
}
// Where the first place of row i and column j is, in elements; the highest bit says that there is not just one.
template <class Rows, class Columns>
W_FN unsigned w_show_first(const Rows& rows, unsigned i, const Columns& columns, unsigned j, unsigned down,
                           unsigned right) {
  const bool one = rows.count[i] == 1u && columns.count[j] == 1u;
  return (rows.place(i, 0u) * down + columns.place(j, 0u) * right & 0x7fffffffu) | (one ? 0u : 0x80000000u);
}
template <int N, class T> W_FN void w_put_all(T* p, const typename w_reg<T>::type (&x)[N]) {
  if constexpr (N == 1) w_st(p, x[0]);
  else w_stv<N>(p, x);
}
template <int N, class T, int INNER, int OUTER, int MOST>
W_FN void w_show_along(T* p, const typename w_reg<T>::type (&x)[N], const w_shown<INNER, OUTER, MOST>& s, unsigned j,
                       w_index right) {
  const unsigned n = s.count[j];
  if (n <= MOST) {
#pragma unroll
    for (unsigned k = 0u; k < MOST; ++k)
      if (k < n) w_put_all<N>(p + s.place(j, k) * right, x);
  } else {
#pragma unroll 1
    for (unsigned o = 0u; o < OUTER; ++o)
      if (s.from[o] == j) w_put_all<N>(p + o * right, x);
  }
}
// N neighbours of row i and column j, to `p` and as many rows of `down` and columns of `right` elements from there;
// `first`: what `w_show_first` says.
template <int N, class T, int H, int HO, int HM, class Columns>
W_FN void w_show(T* p, const typename w_reg<T>::type (&x)[N], unsigned first, const w_shown<H, HO, HM>& rows, unsigned i,
                 const Columns& columns, unsigned j, w_index down, w_index right) {
  if (first < 0x80000000u) {
    w_put_all<N>(p + first, x);
    return;
  }
  const unsigned n = rows.count[i];
  if (n <= HM) {
#pragma unroll 1
    for (unsigned k = 0u; k < n; ++k) w_show_along<N>(p + rows.place(i, k) * down, x, columns, j, right);
  } else {
#pragma unroll 1
    for (unsigned o = 0u; o < HO; ++o)
      if (rows.from[o] == i) w_show_along<N>(p + o * down, x, columns, j, right);
  }
}
