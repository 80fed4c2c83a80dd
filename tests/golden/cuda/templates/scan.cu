// test_scans SHOWN 0
// {"generator": "cuda", "params": [["template", "scan"], ["threads", 128], ["warps", 0]]}
// k: (1, 1, 1) x (128, 1, 1), 0 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_scan.h
extern "C" __global__ void __launch_bounds__(128) k(const w_f16* in0, const w_f16* in1, const w_f16* in2,
    const w_f16* in3, const w_f16* in4, const w_f16* in5, w_f16* __restrict__ out0) {
  static constexpr w_solo role{};
  const w_index p = role.block_x() * 128u + role.thread();
  const w_index row = p / 8u, lane = p % 8u;
  const w_index n = lane;
  const bool k1 = row < 4u;
  const w_index r2 = k1 ? row : 3u;
  const w_index i3 = r2;
  w_f32 h = 0.0f;
  role.pdl_wait();
  role.pdl_trigger();
  const w_f32 e6 = w_ld(in3 + (i3 * 8 + n));
  const w_f32 e7 = e6;
  #pragma unroll 4
  for (w_signed t = 0; t < 12; t += 1) {
    const w_f32 e4 = w_ld(in1 + (i3 * 12 + t));
    const w_f32 e5 = e4;
    const w_f32 e8 = (e5 * e7);
    const w_f32 e9 = w_abs(e8);
    const w_f32 e10 = (-e9);
    const w_f32 e11 = w_exp(e10);
    const w_f32 e12 = w_ld(in4 + (n + t * 8));
    const w_f32 e13 = e12;
    const w_f32 e14 = (e5 * e13);
    const w_f32 e15 = w_ld(in0 + (i3 * 12 + t));
    const w_f32 e16 = e15;
    const w_f32 e17 = (e14 * e16);
    const w_f32 p18 = h;
    const w_f32 e19 = t == 0 ? e17 : w_plus(w_times(e11, h), e17);
    h = e19;
    const w_f32 e20 = w_ld(in5 + (n + t * 8));
    const w_f32 e21 = e20;
    const w_f32 e22 = (e19 * e21);
    w_f32 s23 = e22;
    #pragma unroll
    for (int o = 1; o < 8; o *= 2) s23 = w_plus(s23, w_shfl(s23, o));
    const w_f32 e24 = (s23 + e16);
    const w_f32 e25 = w_ld(in2 + (i3 * 12 + t));
    const w_f32 e26 = e25;
    const w_f32 e27 = w_tanh(e26);
    const w_f32 e28 = (e24 * e27);
    const w_f32 e29 = w_round_f16(e28);
    if (k1 && lane == 0u) { w_st(out0 + (i3 * 12 + t), e28); }
  }
}
