// Attention by fragments over what a CTA has in shared memory. Includes nothing. D: elements of a head, BF: bf16, else f16.
// Rows of D 16-bit elements lie without gaps; chunks of 16 bytes change places within a row, so that eight rows of a
// column of chunks are in different banks.
template <int D> struct w_rows {
  static W_FN u32 at(u32 base, int row, int chunk) { return base + (u32)(row * (D / 8) + (chunk ^ (row & 7))) * 16u; }
};
template <bool BF> W_FN u32 w_pair(float x, float y) { return BF ? w_narrow2_bf16(x, y) : w_narrow2_f16(x, y); }
template <bool BF> W_FN float2 w_unpair(u32 x) { return BF ? w_unpack_bf16(x) : w_unpack_f16(x); }
template <bool BF> W_FN void w_mma_pair(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (BF) w_mma_bf16(d, a, b0, b1); else w_mma_f16(d, a, b0, b1);
}
// the 16 rows of a tile as the left operand of a product over the elements of a head
template <int D> W_FN void w_left(u32 (&a)[D / 16][4], u32 base, int row, int lane) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k) w_matrices(a[k], w_rows<D>::at(base, row + (lane & 15), 2 * k + (lane >> 4)));
}
// s += left (16 x D) right^T, `right` 16 rows from `row` on
template <int D, bool BF> W_FN void w_scores(float (&s)[2][4], const u32 (&a)[D / 16][4], u32 base, int row, int lane) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    u32 b[4];
    w_matrices(b, w_rows<D>::at(base, row + ((lane >> 4) << 3) + (lane & 7), 2 * k + ((lane >> 3) & 1)));
    w_mma_pair<BF>(s[0], a[k], b[0], b[1]);
    w_mma_pair<BF>(s[1], a[k], b[2], b[3]);
  }
}
// o += left (16 x 16) right, `right` 16 rows of D elements from `row` on
template <int D, bool BF> W_FN void w_weighted(float (&o)[D / 8][4], const u32 (&a)[4], u32 base, int row, int lane) {
#pragma unroll
  for (int c = 0; c < D / 8; c += 2) {
    u32 b[4];
    w_matrices_transposed(b, w_rows<D>::at(base, row + (lane & 15), c + (lane >> 4)));
    w_mma_pair<BF>(o[c], a, b[0], b[1]);
    w_mma_pair<BF>(o[c + 1], a, b[2], b[3]);
  }
}
// 16 x 16 results as a left operand
template <bool BF> W_FN void w_as_left(u32 (&a)[4], const float (&s)[2][4]) {
  a[0] = w_pair<BF>(s[0][0], s[0][1]);
  a[1] = w_pair<BF>(s[0][2], s[0][3]);
  a[2] = w_pair<BF>(s[1][0], s[1][1]);
  a[3] = w_pair<BF>(s[1][2], s[1][3]);
}
// 16 x D results times `by` into rows below `count`; `pitch` pairs of elements from row to row
template <int D, bool BF>
W_FN void w_put_rows(u32* to, const float (&o)[D / 8][4], int row, int count, int pitch, float by, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + (lane >> 2) + 8 * h;
    if (r < count) {
#pragma unroll
      for (int c = 0; c < D / 8; ++c)
        to[r * pitch + 4 * c + (lane & 3)] = w_pair<BF>(o[c][2 * h] * by, o[c][2 * h + 1] * by);
    }
  }
}
// sum of the products of eight pairs of elements
template <bool BF> W_FN float w_dot8(uint4 x, uint4 y) {
  const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = w_unpair<BF>(a[i]), v = w_unpair<BF>(b[i]);
    sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
  }
  return sum;
}
