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
    const w_f32 e9 = w_exp(e8);
    const w_f32 e10 = w_ld(in4 + (n + t * 8));
    const w_f32 e11 = e10;
    const w_f32 e12 = (e5 * e11);
    const w_f32 e13 = w_ld(in0 + (i3 * 12 + t));
    const w_f32 e14 = e13;
    const w_f32 e15 = (e12 * e14);
    const w_f32 p16 = h;
    const w_f32 e17 = t == 0 ? e15 : w_plus(w_times(e9, h), e15);
    h = e17;
    const w_f32 e18 = w_ld(in5 + (n + t * 8));
    const w_f32 e19 = e18;
    const w_f32 e20 = (e17 * e19);
    w_f32 s21 = e20;
    #pragma unroll
    for (int o = 1; o < 8; o *= 2) s21 = w_plus(s21, w_shfl(s21, o));
    const w_f32 e22 = (s21 + e14);
    const w_f32 e23 = w_ld(in2 + (i3 * 12 + t));
    const w_f32 e24 = e23;
    const w_f32 e25 = w_tanh(e24);
    const w_f32 e26 = (e22 * e25);
    const w_f32 e27 = w_round_f16(e26);
    if (k1 && lane == 0u) { w_st(out0 + (i3 * 12 + t), e26); }
  }
}
