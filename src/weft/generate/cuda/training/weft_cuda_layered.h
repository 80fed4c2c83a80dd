// What stands beside the products where a network is trained a layer at a time: values lie row-major, their columns padded
// to eights. Stands behind weft_cuda_training.h; includes nothing.
W_FN u16 w_short(u16 x) { return x; }
W_FN u16 w_short(float x) { return (u16)W_NARROW2(x, 0.0f); }
// N by K of a layer's weights, whose rows have FROM columns, as NP by KP with zeros around them in rows of TO, and the same
// turned: a tile of 32 by 32.
template <int N, int K, int NP, int KP, int FROM, int TO, class R, class M>
W_FN void w_images(const R& role, const M* w, u16* plain, u16* turned, int tile, u16 (*held)[33], int t) {
  constexpr int ACROSS = (KP + 31) / 32;
  const int n0 = tile / ACROSS * 32, k0 = tile % ACROSS * 32, x = t % 32;
  for (int y = t / 32; y < 32; y += 8) {
    const int n = n0 + y, k = k0 + x;
    u16 v = 0;
    if (n < N && k < K) v = w_short(w[n * FROM + k]);
    held[y][x] = v;
    if (n < NP && k < KP) plain[n * TO + k] = v;
  }
  role.sync();
  for (int y = t / 32; y < 32; y += 8)
    if (n0 + x < NP && k0 + y < KP) turned[(k0 + y) * NP + n0 + x] = held[x][y];
}
// Eight of the W columns of a row, rounded, zeros behind the last; ALIGNED: elements at whose multiples all of it lies,
// 8 for rows with room behind.
template <int W, int ALIGNED> W_FN uint4 w_eight(const u16* p, int c) {
  if constexpr (ALIGNED == 8) {
    uint4 v = *(const uint4*)(p + c);
    if constexpr (W % 8 != 0) {
      const int left = W - c;
      if (left < 8) v.w = left < 7 ? 0u : v.w & 0xffffu;
      if (left < 6) v.z = left < 5 ? 0u : v.z & 0xffffu;
      if (left < 4) v.y = left < 3 ? 0u : v.y & 0xffffu;
      if (left < 2) v.x = left < 1 ? 0u : v.x & 0xffffu;
    }
    return v;
  }
  constexpr int PAIRS = ALIGNED == 1 ? W | 1 : W;
  u32 v[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) v[e] = c + 2 * e < W ? w_pair<PAIRS>(p, c + 2 * e) : 0u;
  return make_uint4(v[0], v[1], v[2], v[3]);
}
template <int W, int ALIGNED> W_FN uint4 w_eight(const float* p, int c) {
  constexpr bool PAIRS = ALIGNED != 1 && W % 2 == 0;
  u32 v[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int at = c + 2 * e;
    if constexpr (PAIRS) v[e] = w_pair<W>(p, at);
    else v[e] = W_NARROW2(at < W ? p[at] : 0.0f, at + 1 < W ? p[at + 1] : 0.0f);
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}
// From the gradient of the result to that of the last layer's sums; `kept` is what its activation keeps.
template <class A, int N, int NP> W_FN void w_ending(const u16* dy, const u16* kept, u16* dz, u32 rows, u32 first, u32 step) {
  constexpr u32 CHUNKS = NP / 8;
  for (u32 i = first; i < rows * CHUNKS; i += step) {
    const w_rows r = i / CHUNKS;
    const int c = (int)(i % CHUNKS) * 8;
    u32 v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = c + 2 * e;
      v[e] = w_pair<N>(dy + r * N, at);
      if constexpr (A::KEEP != 0) {
        const float2 g = W_UNPACK(v[e]), z = W_UNPACK(w_pair<N>(kept + r * N, at));
        v[e] = W_NARROW2(at < N ? A::back(g.x, z.x) : 0.0f, at + 1 < N ? A::back(g.y, z.y) : 0.0f);
      }
    }
    *(uint4*)(dz + r * NP + c) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}
W_FN void w_add_eight(float (&s)[8], const u16* p) {
  const uint4 v = *(const uint4*)p;
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float2 pair = W_UNPACK(words[e]);
    s[2 * e] += pair.x, s[2 * e + 1] += pair.y;
  }
}
W_FN void w_add_eight(float (&s)[8], const float* p) {
  const float4 a = *(const float4*)p, b = *(const float4*)(p + 4);
  s[0] += a.x, s[1] += a.y, s[2] += a.z, s[3] += a.w, s[4] += b.x, s[5] += b.y, s[6] += b.z, s[7] += b.w;
}
// Sums of columns over a share of the rows, each group of threads over every so many rows, groups in their order.
template <int P, class R, class X>
W_FN void w_column_sums(const R& role, const X* x, float* out, w_rows first, w_rows last, float* held,
                        int t) {
  constexpr int CHUNKS = P / 8, GROUPS = 256 / CHUNKS;
  const int group = t / CHUNKS, c = t % CHUNKS * 8;
  if (group < GROUPS) {
    float s[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) s[e] = 0.0f;
#pragma unroll 4
    for (w_rows r = first + group; r < last; r += GROUPS) w_add_eight(s, x + r * P + c);
#pragma unroll
    for (int e = 0; e < 8; ++e) held[group * P + c + e] = s[e];
  }
  role.sync();
  for (int i = t; i < P; i += 256) {
    float sum = 0.0f;
    for (int g = 0; g < GROUPS; ++g) sum += held[g * P + i];
    out[i] = sum;
  }
}
