// Running maxima of 16 bytes of neighbouring channels: see pools.py.
W_FN unsigned w_max_word(unsigned a, unsigned b, const w_f32*) {
  return w_bits<unsigned>(w_max_f32(w_bits<w_f32>(a), w_bits<w_f32>(b)));
}
#ifdef __CUDA_ARCH__
W_FN unsigned w_max_word(unsigned a, unsigned b, const w_f16*) {
  unsigned x;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
W_FN unsigned w_max_word(unsigned a, unsigned b, const w_bf16*) {
  unsigned x;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
#else
template <class T> W_FN unsigned w_max_word(unsigned a, unsigned b, const T* t) {
  unsigned x = 0;
  for (int i = 0; i < 2; ++i) {
    const w_f32 most = w_max_f32(w_part(a, i, t), w_part(b, i, t));
    x |= (unsigned)w_narrow<T>(most).bits << (16 * i);
  }
  return x;
}
#endif
// The greatest of those at most R from `at` on a line of `size` elements, STRIDE apart. Past an end the last element
// counts once more: it is in the window anyway.
template <class T, int R, int STRIDE> W_FN w_chunk<16> w_greatest(const w_chunk<16>* line, int at, int size) {
  w_chunk<16> c = line[at * STRIDE];
#pragma unroll
  for (int d = 1; d <= R; ++d) {
    const w_chunk<16> a = line[(at < d ? 0 : at - d) * STRIDE];
    const w_chunk<16> b = line[(at + d < size ? at + d : size - 1) * STRIDE];
#pragma unroll
    for (int i = 0; i < 4; ++i) c.x[i] = w_max_word(w_max_word(a.x[i], b.x[i], (const T*)0), c.x[i], (const T*)0);
  }
  return c;
}
