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
    const w_f32 e14 = w_ld(in0 + (i1 * 12 + t));
    const w_f32 e15 = e14;
    #pragma unroll
    for (w_signed n = 0; n < 8; n += 1) {
      const w_f32 e5 = w_ld(in3 + (i1 * 8 + n));
      const w_f32 e6 = e5;
      const w_f32 e7 = (e4 * e6);
      const w_f32 e8 = w_abs(e7);
      const w_f32 e9 = (-e8);
      const w_f32 e10 = w_exp(e9);
      const w_f32 e11 = w_ld(in4 + (n + t * 8));
      const w_f32 e12 = e11;
      const w_f32 e13 = (e4 * e12);
      const w_f32 e16 = (e13 * e15);
      w_linear<w_f32> w19 = {t == 0u ? 0.0f : e10, e16};
      if (!(s < 12u)) w19 = w_linear<w_f32>::none();
      w_linear<w_f32> b18 = w_before(w19, lane);
      const w_f32 p20 = b18.of(h[n]);
      h[n] = w19.of(h[n]);
      const w_f32 m1721 = t == 0u ? e16 : w_plus(w_times(e10, p20), e16);
      const w_f32 e22 = w_ld(in5 + (n + t * 8));
      const w_f32 e23 = e22;
      const w_f32 e24 = (m1721 * e23);
      s2 = w_plus(s2, e24);
    }
    const w_f32 e25 = (s2 + e15);
    const w_f32 e26 = w_ld(in2 + (i1 * 12 + t));
    const w_f32 e27 = e26;
    const w_f32 e28 = w_tanh(e27);
    const w_f32 e29 = (e25 * e28);
    const w_f32 e30 = w_round_f16(e29);
    if (s < 12u) { w_st(out0 + (i1 * 12 + t), e29); }
  }
}
