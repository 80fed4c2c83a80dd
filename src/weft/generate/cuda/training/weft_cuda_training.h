// Gradients of fully connected networks: a warp owns rows, and a value of the network is, to it, fragments of 16 rows.
// In memory and in shared memory values and weights lie in blocks of 8 rows of 8 columns, 128 bytes each, so that one
// image serves a product and its transposed. W_MMA, W_NARROW2 and W_UNPACK are those of f16 or bf16. Includes nothing.
typedef long long w_rows;
// For each word of T tiles of 16 rows of C sixteens of columns.
#define W_WORDS(T, C) \
  _Pragma("unroll") for (int m = 0; m < T; ++m) _Pragma("unroll") for (int c = 0; c < 2 * C; ++c) \
  _Pragma("unroll") for (int half = 0; half < 2; ++half)
W_FN u32* w_word(const char* kept, w_rows record, int m, int c, int half, int lane) {
  return (u32*)(kept + m * record + (c * 2 + half) * 128 + lane * 4);
}
W_FN void w_keep(char* to, const u32 (&a)[4], int k, int lane, bool live) {
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (live) *(u32*)(to + ((2 * k + (e >> 1)) * 2 + (e & 1)) * 128 + lane * 4) = a[e];
}
// Two neighbouring columns of a row-major matrix with K columns as a word of 16-bit numbers; EVEN: rows begin at even ones.
template <int K, bool EVEN = true> W_FN u32 w_pair(const u16* p, int column) {
  if constexpr (EVEN && K % 2 == 0) return column < K ? *(const u32*)(p + column) : 0u;
  return (column < K ? (u32)p[column] : 0u) | (column + 1 < K ? (u32)p[column + 1] << 16 : 0u);
}
template <int K, bool EVEN = true> W_FN u32 w_pair(const float* p, int column) {
  if constexpr (EVEN && K % 2 == 0) {
    const float2 v = column < K ? *(const float2*)(p + column) : make_float2(0.0f, 0.0f);
    return W_NARROW2(v.x, v.y);
  }
  return W_NARROW2(column < K ? p[column] : 0.0f, column + 1 < K ? p[column + 1] : 0.0f);
}
template <int K, bool EVEN = true> W_FN void w_put(u16* p, int column, float a, float b) {
  const u32 v = W_NARROW2(a, b);
  if constexpr (EVEN && K % 2 == 0) {
    if (column < K) *(u32*)(p + column) = v;
  } else {
    if (column < K) p[column] = (u16)v;
    if (column + 1 < K) p[column + 1] = (u16)(v >> 16);
  }
}
template <int K, bool EVEN = true> W_FN void w_put(float* p, int column, float a, float b) {
  if constexpr (EVEN && K % 2 == 0) {
    if (column < K) *(float2*)(p + column) = make_float2(a, b);
  } else {
    if (column < K) p[column] = a;
    if (column + 1 < K) p[column + 1] = b;
  }
}
// K columns of rows of S in memory as left operands; zeros where there are none.
template <int K, int S, bool EVEN, class X, int T, int C>
W_FN void w_read_rows(u32 (&a)[T][C][4], const X* x, w_rows row0, w_rows rows, int lane) {
  const int g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const w_rows r = row0 + m * 16 + half * 8 + g;
      const X* const from = x + (r < rows ? r : rows - 1) * S;
#pragma unroll
      for (int c = 0; c < 2 * C; ++c) {
        const u32 v = w_pair<K, EVEN>(from, c * 8 + 2 * q);
        a[m][c / 2][c % 2 * 2 + half] = r < rows ? v : 0u;
      }
    }
}
template <int C, int T> W_FN void w_zero(float (&d)[T][C][4]) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[m][c][e] = 0.0f;
}
template <int N, int T> W_FN void w_begin(float (&d)[T][2 * N][4], const float* b, int lane) {
#pragma unroll
  for (int c = 0; c < 2 * N; ++c) {
    const float2 v = *(const float2*)(b + c * 8 + (lane & 3) * 2);
#pragma unroll
    for (int m = 0; m < T; ++m) d[m][c][0] = d[m][c][2] = v.x, d[m][c][1] = d[m][c][3] = v.y;
  }
}
// d += a W^T over sixteens [FIRST, LAST) of the K of a layer; blocks of weights lie at w as [k / 16][n / 8][k / 8 % 2]
template <int K, int N, int T, int FIRST, int LAST>
W_FN void w_up(float (&d)[T][2 * N][4], const u32 (&a)[T][K][4], u32 w, int lane) {
  const u32 at = w + (lane >> 3) * 128 + (lane & 7) * 16;
#pragma unroll
  for (int k = FIRST; k < LAST; ++k)
#pragma unroll
    for (int j = 0; j < N; ++j) {
      u32 r[4];
      w_matrices(r, at + ((k - FIRST) * 2 * N + 2 * j) * 256);
#pragma unroll
      for (int m = 0; m < T; ++m) W_MMA(d[m][2 * j], a[m][k], r[0], r[1]), W_MMA(d[m][2 * j + 1], a[m][k], r[2], r[3]);
    }
}
// d += a W over sixteens [FIRST, LAST) of its N; of each sixteen of K the blocks of these rows alone lie at w
template <int K, int N, int T, int FIRST, int LAST>
W_FN void w_down(float (&d)[T][2 * K][4], const u32 (&a)[T][N][4], u32 w, int lane) {
  const u32 at = w + (lane >> 3 & 1) * 256 + (lane >> 4) * 128 + (lane & 7) * 16;
#pragma unroll
  for (int n = FIRST; n < LAST; ++n)
#pragma unroll
    for (int j = 0; j < K; ++j) {
      u32 r[4];
      w_matrices_transposed(r, at + (j * 2 * (LAST - FIRST) + 2 * (n - FIRST)) * 256);
#pragma unroll
      for (int m = 0; m < T; ++m) W_MMA(d[m][2 * j], a[m][n], r[0], r[1]), W_MMA(d[m][2 * j + 1], a[m][n], r[2], r[3]);
    }
}
// Zeros behind W columns: what is multiplied with weights that are zeros must be finite.
template <int W, int T, int C> W_FN void w_bound(float (&d)[T][C][4], int lane) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int c = W / 8; c < C; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (c * 8 + 2 * (lane & 3) + e % 2 >= W) d[m][c][e] = 0.0f;
}
// What an activation that keeps its sums reads of them on the way down.
template <class A, int C>
W_FN void w_keep_sums(char* sums, const float (&d)[C][4], int k, int lane, bool live) {
  if constexpr (A::KEEP == 2) {
    u32 z[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) z[e] = W_NARROW2(d[2 * k + e / 2][e % 2 * 2], d[2 * k + e / 2][e % 2 * 2 + 1]);
    w_keep(sums, z, k, lane, live);
  }
}
template <class A, int C> W_FN void w_activate(u32 (&z)[4], const float (&d)[C][4], int k) {
#pragma unroll
  for (int e = 0; e < 4; ++e) z[e] = A::both(d[2 * k + e / 2][e % 2 * 2], d[2 * k + e / 2][e % 2 * 2 + 1]);
}
// The end of one layer upwards: what the way down needs is kept.
template <class A, int N, int T>
W_FN void w_layer(u32 (&h)[T][N][4], const float (&d)[T][2 * N][4], char* kept, char* sums, w_rows record, int lane, bool live) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int k = 0; k < N; ++k) {
      w_keep_sums<A>(sums + m * record, d[m], k, lane, live);
      w_activate<A>(h[m][k], d[m], k);
      w_keep(kept + m * record, h[m][k], k, lane, live);
    }
}
// The gradient of the last layer's sums d, from that of the result, which is in `dz` before.
template <class A, int N, int T> W_FN void w_last(u32 (&dz)[T][N][4], const float (&d)[T][2 * N][4]) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int k = 0; k < N; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* const z = &d[m][2 * k + e / 2][e % 2 * 2];
        const float2 g = W_UNPACK(dz[m][k][e]);
        const float u = A::KEEP == 1 ? A::of(z[0]) : z[0], v = A::KEEP == 1 ? A::of(z[1]) : z[1];
        dz[m][k][e] = W_NARROW2(A::back(g.x, u), A::back(g.y, v));
      }
}
// What is kept of the layer below, read before the product as far as registers go.
template <class A, int K, int T> struct w_early {
  enum { EARLY = W_EARLY && A::KEEP != 0 && K * T <= 8 };
  u32 word[EARLY ? T : 1][EARLY ? 2 * K : 1][2];
  W_FN void read(const char* kept, w_rows record, int lane) {
    if constexpr (EARLY) {
      W_WORDS(T, K) word[m][c][half] = *w_word(kept, record, m, c, half, lane);
    }
  }
};
// The end of one layer downwards: to the gradient of the sums of the layer below, whose activation is A.
template <class A, int K, int T>
W_FN void w_below(u32 (&below)[T][K][4], const float (&d)[T][2 * K][4], const w_early<A, K, T>& early, const char* kept, w_rows record, int lane) {
  W_WORDS(T, K) {
    float x = d[m][c][2 * half], y = d[m][c][2 * half + 1];
    if constexpr (A::KEEP != 0) {
      u32 word;
      if constexpr (w_early<A, K, T>::EARLY) word = early.word[m][c][half];
      else word = *w_word(kept, record, m, c, half, lane);
      const float2 v = W_UNPACK(word);
      x = A::back(x, v.x), y = A::back(y, v.y);
    }
    below[m][c / 2][c % 2 * 2 + half] = W_NARROW2(x, y);
  }
}
template <int T, int C> W_FN void w_keep_all(char* to, const u32 (&a)[T][C][4], w_rows record, int lane, bool live) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int k = 0; k < C; ++k) w_keep(to + m * record, a[m][k], k, lane, live);
}
template <int T, int C> W_FN void w_move(u32 (&to)[T][C][4], const u32 (&a)[T][C][4]) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int k = 0; k < C; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[m][k][e] = a[m][k][e];
}
// The gradient of such columns of the input.
template <int K, int S, bool EVEN, int C, class X, int T>
W_FN void w_input(X* dx, const float (&d)[T][2 * C][4], w_rows row0, w_rows rows, int lane) {
#pragma unroll
  for (int m = 0; m < T; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const w_rows r = row0 + m * 16 + half * 8 + (lane >> 2);
      if (r < rows) {
#pragma unroll
        for (int c = 0; c < 2 * C; ++c)
          w_put<K, EVEN>(dx + r * S, c * 8 + (lane & 3) * 2, d[m][c][2 * half], d[m][c][2 * half + 1]);
      }
    }
}
// Sums over rows of products of two kept values, M by N sixteens, and of the first value by itself (the last columns of
// `out`); warps of a block take rows in turn and are added in their order.
template <int M, int N, bool BIAS, int STAGES, class R>
W_FN void w_row_sums(const R& role, const char* kept, w_rows record, int left, int right, w_rows first, w_rows last, float* out, bool more,
                     unsigned char* sm, int warp, int warps, int lane) {
  constexpr int SIZE = (M + N) * 512, B = BIAS ? M : 1;
  float d[M][2 * N][4], b[B][4];
  w_zero<2 * N, M>(d);
#pragma unroll
  for (int i = 0; i < B; ++i) b[i][0] = b[i][1] = b[i][2] = b[i][3] = 0.0f;
  const u32 ring = w_shared(sm) + warp * STAGES * SIZE;
  auto ask = [&](w_rows tile, int stage) {
    if (tile < last) {
      const char* const from = kept + tile * record + lane * 16;
      const u32 to = ring + stage * SIZE + lane * 16;
#pragma unroll
      for (int i = 0; i < M; ++i) w_copy16(to + i * 512, from + left + i * 512);
#pragma unroll
      for (int i = 0; i < N; ++i) w_copy16(to + (M + i) * 512, from + right + i * 512);
    }
    w_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) ask(first + i, i);
  int stage = 0;
#pragma unroll 1
  for (w_rows tile = first; tile < last; ++tile) {
    w_arrived<STAGES - 2>();
    w_together();
    ask(tile + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    const u32 at = ring + stage * SIZE + (lane & 7) * 16;
    u32 r[N][4];
#pragma unroll
    for (int j = 0; j < N; ++j) w_matrices_transposed(r[j], at + M * 512 + ((2 * j + (lane >> 4)) * 2 + (lane >> 3 & 1)) * 128);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      u32 a[4];
      w_matrices_transposed(a, at + ((2 * i + (lane >> 3 & 1)) * 2 + (lane >> 4)) * 128);
#pragma unroll
      for (int j = 0; j < N; ++j) W_MMA(d[i][2 * j], a, r[j][0], r[j][1]), W_MMA(d[i][2 * j + 1], a, r[j][2], r[j][3]);
      if constexpr (BIAS) W_MMA(b[i], a, W_ONES, W_ONES);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  w_arrived<0>();
  float* const lent = (float*)sm + lane;
#define W_EACH(STATEMENT, BIASED) \
  _Pragma("unroll") for (int i = 0; i < M; ++i) _Pragma("unroll") for (int c = 0; c < 2 * N; ++c) \
  _Pragma("unroll") for (int e = 0; e < 4; ++e) { const int at = ((i * 2 * N + c) * 4 + e) * 32; STATEMENT; } \
  if constexpr (BIAS) { \
    _Pragma("unroll") for (int i = 0; i < M; ++i) _Pragma("unroll") for (int e = 0; e < 4; ++e) { \
      const int at = (M * 2 * N * 4 + i * 4 + e) * 32; BIASED; } \
  }
  role.sync();
#pragma unroll 1
  for (int from = warps - 1; from > 0; --from) {
    if (warp == from) { W_EACH(lent[at] = d[i][c][e], lent[at] = b[i][e]) }
    role.sync();
    if (warp == 0) { W_EACH(d[i][c][e] += lent[at], b[i][e] += lent[at]) }
    role.sync();
  }
  if (warp == 0) {
    out += lane;
    if (more) { W_EACH(d[i][c][e] += out[at], b[i][e] += out[at]) }
    W_EACH(out[at] = d[i][c][e], out[at] = b[i][e])
  }
#undef W_EACH
}

// The same for 8 by 8 sixteens at once, of which each of four warps has 4 by 4: a row is copied once for all of them. Two
// such fours of warps take rows in turn, and the first adds the other's sums.
template <bool BIAS, int STAGES, class R>
W_FN void w_quad_sums(const R& role, const char* kept, w_rows record, int left, int right, w_rows first, w_rows last, float* out, bool biased,
                      bool more, unsigned char* sm, int t) {
  constexpr int TILE = 16 * 512, TILES = 4, B = BIAS ? 4 : 1;
  const int lane = t & 31, warp = t >> 5 & 3, other = t >> 7;
  float d[4][8][4], b[B][4];
  w_zero<8, 4>(d);
#pragma unroll
  for (int i = 0; i < B; ++i) b[i][0] = b[i][1] = b[i][2] = b[i][3] = 0.0f;
  const u32 ring = w_shared(sm);
  const int own = t / 32 * 512 + lane * 16;
  auto ask = [&](w_rows tile, int stage) {
    // 256 threads copy half of a tile at a time
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      const w_rows from = tile + i / 2;
      const u32 to = ring + (stage * TILES * 2 + i) * (TILE / 2) + t * 16;
      if (from < last) w_copy16(to, kept + from * record + (i % 2 ? right : left) + own);
    }
    w_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) ask(first + i * TILES, i);
  int stage = 0;
#pragma unroll 1
  for (w_rows tile = first; tile < last; tile += TILES) {
    w_arrived<STAGES - 2>();
    role.sync();
    ask(tile + (STAGES - 1) * TILES, stage == 0 ? STAGES - 1 : stage - 1);
#pragma unroll 1
    for (int mine = other; mine < TILES && tile + mine < last; mine += 2) {
      const u32 at = ring + (stage * TILES + mine) * TILE + (lane & 7) * 16;
      const u32 x = at + (8 + warp % 2 * 4) * 512, y = at + warp / 2 * 4 * 512;
      u32 r[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w_matrices_transposed(r[j], x + ((2 * j + (lane >> 4)) * 2 + (lane >> 3 & 1)) * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 a[4];
        w_matrices_transposed(a, y + ((2 * i + (lane >> 3 & 1)) * 2 + (lane >> 4)) * 128);
#pragma unroll
        for (int j = 0; j < 4; ++j) W_MMA(d[i][2 * j], a, r[j][0], r[j][1]), W_MMA(d[i][2 * j + 1], a, r[j][2], r[j][3]);
        if constexpr (BIAS) {
          if (biased) W_MMA(b[i], a, W_ONES, W_ONES);
        }
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  w_arrived<0>();
  float* const lent = (float*)sm + warp * 144 * 32 + lane;
#define W_ALL(STATEMENT, BIASED) \
  _Pragma("unroll") for (int i = 0; i < 4; ++i) _Pragma("unroll") for (int c = 0; c < 8; ++c) \
  _Pragma("unroll") for (int e = 0; e < 4; ++e) { const int at = ((i * 8 + c) * 4 + e) * 32; STATEMENT; } \
  if constexpr (BIAS) { \
    _Pragma("unroll") for (int i = 0; i < 4; ++i) _Pragma("unroll") for (int e = 0; e < 4; ++e) { \
      const int at = (128 + i * 4 + e) * 32; BIASED; } \
  }
  role.sync();
  if (other) { W_ALL(lent[at] = d[i][c][e], lent[at] = b[i][e]) }
  role.sync();
  if (!other) {
    W_ALL(d[i][c][e] += lent[at], b[i][e] += lent[at])
    out += lane;
    if (more) { W_ALL(d[i][c][e] += out[at], if (biased) b[i][e] += out[at]) }
    W_ALL(out[at] = d[i][c][e], if (biased) out[at] = b[i][e])
  }
#undef W_ALL
}

// The same for values in shared memory, kept by the warps of a block for TILES tiles: each warp has P results of 2 by 2
// sixteens; where a value ends before, what lies behind it is read and its sums are nobody's.
template <int P, int TILES>
W_FN void w_shared_sums(float (&d)[P][2][4][4], float (&b)[P][2][4], u32 kept, u32 record, const int (&left)[P],
                        const int (&right)[P], const int (&used)[P], int lane) {
#pragma unroll
  for (int p = 0; p < P; ++p) {
    if (used[p] == 0) continue;
#pragma unroll 2
    for (int tile = 0; tile < TILES; ++tile) {
      const u32 at = kept + tile * record + (lane & 7) * 16;
      u32 r[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) w_matrices_transposed(r[j], at + right[p] + ((2 * j + (lane >> 4)) * 2 + (lane >> 3 & 1)) * 128);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 a[4];
        w_matrices_transposed(a, at + left[p] + ((2 * i + (lane >> 3 & 1)) * 2 + (lane >> 4)) * 128);
#pragma unroll
        for (int j = 0; j < 2; ++j) W_MMA(d[p][i][2 * j], a, r[j][0], r[j][1]), W_MMA(d[p][i][2 * j + 1], a, r[j][2], r[j][3]);
        if (used[p] == 2) W_MMA(b[p][i], a, W_ONES, W_ONES);
      }
    }
  }
}
template <int P> W_FN void w_put_sums(float* to, const float (&d)[P][2][4][4], const float (&b)[P][2][4], const int (&used)[P], w_rows step, int lane) {
#pragma unroll
  for (int p = 0; p < P; ++p) {
    if (used[p] == 0) continue;
    float* const out = to + p * step + lane;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[((i * 4 + c) * 4 + e) * 32] = d[p][i][c][e];
#pragma unroll
      for (int e = 0; e < 4; ++e) out[(32 + i * 4 + e) * 32] = b[p][i][e];
    }
  }
}
