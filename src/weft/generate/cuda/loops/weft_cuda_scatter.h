// Results that are stored to all places which show them: see scatter.py.
// Which of OUTER rows (or columns) of a result show each of INNER ones; of those that MOST are too few for, `from` says it.
template <int INNER, int OUTER, int MOST> struct w_shown {
  unsigned count[INNER];
  unsigned short at[INNER * MOST], from[OUTER];
};
template <int THREADS, class Role, int INNER, int OUTER, int MOST>
W_FN void w_show_none(const Role role, w_shown<INNER, OUTER, MOST>& s) {
  for (unsigned i = role.thread(); i < INNER; i += THREADS) s.count[i] = 0u;
}
template <int INNER, int OUTER, int MOST> W_FN void w_show_at(w_shown<INNER, OUTER, MOST>& s, unsigned o, unsigned i) {
#ifdef __CUDA_ARCH__
  const unsigned k = atomicAdd(&s.count[i], 1u);  // in any order: all of them get the same value
#else
  const unsigned k = s.count[i]++;
#endif
  if (k < MOST) s.at[i * MOST + k] = (unsigned short)o;
  s.from[o] = (unsigned short)i;
}
template <int N, class T> W_FN void w_put_all(T* p, const typename w_reg<T>::type (&x)[N]) {
  if constexpr (N == 1) w_st(p, x[0]);
  else w_stv<N>(p, x);
}
template <int N, class T, int INNER, int OUTER, int MOST>
W_FN void w_show_along(T* p, const typename w_reg<T>::type (&x)[N], const w_shown<INNER, OUTER, MOST>& s, unsigned i,
                       w_index step) {
  const unsigned n = s.count[i];
  if (n <= MOST) {
#pragma unroll 1
    for (unsigned k = 0u; k < n; ++k) w_put_all<N>(p + s.at[i * MOST + k] * step, x);
  } else {
#pragma unroll 1
    for (unsigned o = 0u; o < OUTER; ++o)
      if (s.from[o] == i) w_put_all<N>(p + o * step, x);
  }
}
// N neighbours of row i and column j, to `p` and as many rows of `down` and columns of `right` elements from there.
template <int N, class T, int H, int HO, int HM, int W, int WO, int WM>
W_FN void w_show(T* p, const typename w_reg<T>::type (&x)[N], const w_shown<H, HO, HM>& rows, unsigned i,
                 const w_shown<W, WO, WM>& columns, unsigned j, w_index down, w_index right) {
  const unsigned n = rows.count[i];
  if (n <= HM) {
#pragma unroll 1
    for (unsigned k = 0u; k < n; ++k) w_show_along<N>(p + rows.at[i * HM + k] * down, x, columns, j, right);
  } else {
#pragma unroll 1
    for (unsigned o = 0u; o < HO; ++o)
      if (rows.from[o] == i) w_show_along<N>(p + o * down, x, columns, j, right);
  }
}
