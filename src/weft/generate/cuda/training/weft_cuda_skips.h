// Networks with skips: values that a warp left in memory, or that lie beside others in the given matrix, are read again
// by the lanes that hold them. W_KIND is f16 or bf16. Includes nothing.
W_FN u32* w_word(char* kept, w_rows record, int m, int c, int half, int lane) {
  return (u32*)(kept + m * record + (c * 2 + half) * 128 + lane * 4);
}
// K columns of rows of S columns; EVEN: each row begins at an even one
template <int K, int S, bool EVEN, class X, int T, int C>
W_FN void w_read_part(u32 (&a)[T][C][4], const X* x, w_rows row0, w_rows rows, int lane) {
  const int g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const w_rows r = row0 + m * 16 + half * 8 + g;
      const X* const from = x + (r < rows ? r : rows - 1) * S;
#pragma unroll
      for (int c = 0; c < 2 * C; ++c) {
        const int column = c * 8 + 2 * q;
        u32 v = 0u;
        if constexpr (EVEN && K % 2 == 0) v = w_pair<K>(from, column);
        else if constexpr (sizeof(X) == 2) v = (column < K ? (u32)from[column] : 0u) | (column + 1 < K ? (u32)from[column + 1] << 16 : 0u);
        else v = w_narrow2_W_KIND(column < K ? from[column] : 0.0f, column + 1 < K ? from[column + 1] : 0.0f);
        a[m][c / 2][c % 2 * 2 + half] = r < rows ? v : 0u;
      }
    }
}
W_FN void w_put_one(u16* p, float a) { *p = (u16)w_narrow2_W_KIND(a, 0.0f); }
W_FN void w_put_one(float* p, float a) { *p = a; }
// The gradient of such columns.
template <int K, int S, bool EVEN, int C, class X, int T>
W_FN void w_part(X* dx, const float (&d)[T][2 * C][4], w_rows row0, w_rows rows, int lane) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const w_rows r = row0 + m * 16 + half * 8 + (lane >> 2);
      if (r < rows) {
#pragma unroll
        for (int c = 0; c < 2 * C; ++c) {
          const int column = c * 8 + (lane & 3) * 2;
          if constexpr (EVEN && K % 2 == 0) w_put<K>(dx + r * S, column, d[m][c][2 * half], d[m][c][2 * half + 1]);
          else {
            if (column < K) w_put_one(dx + r * S + column, d[m][c][2 * half]);
            if (column + 1 < K) w_put_one(dx + r * S + column + 1, d[m][c][2 * half + 1]);
          }
        }
      }
    }
}
template <int T, int C> W_FN void w_recall(u32 (&a)[T][C][4], char* kept, w_rows record, int lane) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int c = 0; c < 2 * C; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) a[m][c / 2][c % 2 * 2 + half] = *w_word(kept, record, m, c, half, lane);
}
// d += a kept value
template <int C, int T> W_FN void w_more(float (&d)[T][2 * C][4], char* kept, w_rows record, int lane) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int c = 0; c < 2 * C; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 v = w_unpack_W_KIND(*w_word(kept, record, m, c, half, lane));
        d[m][c][2 * half] += v.x, d[m][c][2 * half + 1] += v.y;
      }
}
// What is known of a gradient: the first share, or another one.
template <bool FIRST, int C, int T>
W_FN void w_pend(char* to, const float (&d)[T][2 * C][4], w_rows record, int lane, bool live) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int c = 0; c < 2 * C; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32* const word = w_word(to, record, m, c, half, lane);
        float2 v = make_float2(0.0f, 0.0f);
        if constexpr (!FIRST) v = w_unpack_W_KIND(*word);
        if (live) *word = w_narrow2_W_KIND(v.x + d[m][c][2 * half], v.y + d[m][c][2 * half + 1]);
      }
}
template <bool FIRST, int T, int C>
W_FN void w_pend(char* to, const u32 (&a)[T][C][4], w_rows record, int lane, bool live) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int c = 0; c < 2 * C; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32* const word = w_word(to, record, m, c, half, lane);
        u32 own = a[m][c / 2][c % 2 * 2 + half];
        if constexpr (!FIRST) {
          const float2 v = w_unpack_W_KIND(*word), w = w_unpack_W_KIND(own);
          own = w_narrow2_W_KIND(v.x + w.x, v.y + w.y);
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
      u32 z[4];
      if constexpr (A::KEEP == 2) {
#pragma unroll
        for (int e = 0; e < 4; ++e) z[e] = w_narrow2_W_KIND(d[m][2 * k + e / 2][e % 2 * 2], d[m][2 * k + e / 2][e % 2 * 2 + 1]);
        w_keep(sums + m * record, z, k, lane, live);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) z[e] = A::both(d[m][2 * k + e / 2][e % 2 * 2], d[m][2 * k + e / 2][e % 2 * 2 + 1]);
      if constexpr (A::KEEP == 1) w_keep(own + m * record, z, k, lane, live);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 v = w_unpack_W_KIND(z[e]), w = w_unpack_W_KIND(*w_word(more, record, m, 2 * k + e / 2, e % 2, lane));
        h[m][k][e] = w_narrow2_W_KIND(v.x + w.x, v.y + w.y);
      }
      w_keep(kept + m * record, h[m][k], k, lane, live);
    }
}
