// test_scans SHOWN 0
// {"generator": "cuda", "params": [["template", "scan"], ["threads", 128], ["warps", 1]]}
// k: (1, 1, 1) x (128, 1, 1), 0 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_scan.h
extern "C" __global__ void __launch_bounds__(128) k(const w_f16* in0, const w_f16* in1, const w_f16* in2,
    const w_f16* in3, const w_f16* in4, const w_f16* in5, w_f16* __restrict__ out0) {
  static constexpr w_solo role{};
  const unsigned lane = role.thread() % 32u;
  const w_index row = role.block_x() * 4u + role.thread() / 32u;
  const w_index i1 = row;
  w_f32 h[8];
  #pragma unroll
  for (int i = 0; i < 8; ++i) h[i] = 0.0f;
  #pragma unroll 1
  {
    const w_signed c = 0;
    const w_index s = c * 32 + lane;
    const w_index t = s < 12u ? s : 11u;
    w_f32 s2 = 0.0f;
    role.pdl_wait();
    role.pdl_trigger();
    const w_f32 e3 = w_ld(in1 + (i1 * 12 + t));
    const w_f32 e4 = e3;
    const w_f32 e12 = w_ld(in0 + (i1 * 12 + t));
    const w_f32 e13 = e12;
    #pragma unroll
    for (w_signed n = 0; n < 8; n += 1) {
      const w_f32 e5 = w_ld(in3 + (i1 * 8 + n));
      const w_f32 e6 = e5;
      const w_f32 e7 = (e4 * e6);
      const w_f32 e8 = w_exp(e7);
      const w_f32 e9 = w_ld(in4 + (n + t * 8));
      const w_f32 e10 = e9;
      const w_f32 e11 = (e4 * e10);
      const w_f32 e14 = (e11 * e13);
      w_linear<w_f32> w17 = {t == 0u ? 0.0f : e8, e14};
      if (!(s < 12u)) w17 = w_linear<w_f32>::none();
      w_linear<w_f32> b16 = w_before(w17, lane);
      const w_f32 p18 = b16.of(h[n]);
      h[n] = w17.of(h[n]);
      const w_f32 m1519 = t == 0u ? e14 : w_plus(w_times(e8, p18), e14);
      const w_f32 e20 = w_ld(in5 + (n + t * 8));
      const w_f32 e21 = e20;
      const w_f32 e22 = (m1519 * e21);
      s2 = w_plus(s2, e22);
    }
    const w_f32 e23 = (s2 + e13);
    const w_f32 e24 = w_ld(in2 + (i1 * 12 + t));
    const w_f32 e25 = e24;
    const w_f32 e26 = w_tanh(e25);
    const w_f32 e27 = (e23 * e26);
    const w_f32 e28 = w_round_f16(e27);
    if (s < 12u) { w_st(out0 + (i1 * 12 + t), e27); }
  }
}
