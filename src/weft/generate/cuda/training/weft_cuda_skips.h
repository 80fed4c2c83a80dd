// Networks with skips: values that a warp left in memory are read again by the lanes that hold them.
// Stands behind weft_cuda_training.h; includes nothing.
template <int T, int C> W_FN void w_recall(u32 (&a)[T][C][4], char* kept, w_rows record, int lane) {
  W_WORDS(T, C) a[m][c / 2][c % 2 * 2 + half] = *w_word(kept, record, m, c, half, lane);
}
// d += a kept value
template <int C, int T> W_FN void w_more(float (&d)[T][2 * C][4], char* kept, w_rows record, int lane) {
  W_WORDS(T, C) {
    const float2 v = W_UNPACK(*w_word(kept, record, m, c, half, lane));
    d[m][c][2 * half] += v.x, d[m][c][2 * half + 1] += v.y;
  }
}
// What is known of a gradient: the first share, or another one.
template <bool FIRST, int C, int T>
W_FN void w_pend(char* to, const float (&d)[T][2 * C][4], w_rows record, int lane, bool live) {
  W_WORDS(T, C) {
    u32* const word = w_word(to, record, m, c, half, lane);
    float2 v = make_float2(0.0f, 0.0f);
    if constexpr (!FIRST) v = W_UNPACK(*word);
    if (live) *word = W_NARROW2(v.x + d[m][c][2 * half], v.y + d[m][c][2 * half + 1]);
  }
}
template <bool FIRST, int T, int C>
W_FN void w_pend(char* to, const u32 (&a)[T][C][4], w_rows record, int lane, bool live) {
  W_WORDS(T, C) {
    u32* const word = w_word(to, record, m, c, half, lane);
    u32 own = a[m][c / 2][c % 2 * 2 + half];
    if constexpr (!FIRST) {
      const float2 v = W_UNPACK(*word), w = W_UNPACK(own);
      own = W_NARROW2(v.x + w.x, v.y + w.y);
    }
    if (live) *word = own;
  }
}
// The end of one layer upwards whose result takes in a kept value; `own`: what the activation gave.
template <class A, int N, int T>
W_FN void w_layer_more(u32 (&h)[T][N][4], const float (&d)[T][2 * N][4], char* kept, char* sums, char* own, char* more,
                       w_rows record, int lane, bool live) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int k = 0; k < N; ++k) {
      w_keep_sums<A>(sums + m * record, d[m], k, lane, live);
      u32 z[4];
      w_activate<A>(z, d[m], k);
      if constexpr (A::KEEP == 1) w_keep(own + m * record, z, k, lane, live);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 v = W_UNPACK(z[e]), w = W_UNPACK(*w_word(more, record, m, 2 * k + e / 2, e % 2, lane));
        h[m][k][e] = W_NARROW2(v.x + w.x, v.y + w.y);
      }
      w_keep(kept + m * record, h[m][k], k, lane, live);
    }
}
