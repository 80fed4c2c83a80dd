// test_scans SHOWN 1
// {"generator": "cuda", "params": [["template", "scan"], ["threads", 256], ["warps", 8]]}
// k: (8, 1, 1) x (256, 1, 1), 0 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_scan.h
extern "C" __global__ void __launch_bounds__(256) k(const w_f32* in0, const w_f32* in1, w_f32* __restrict__ out0) {
  static constexpr w_solo role{};
  const unsigned lane = role.thread() % 32u;
  const unsigned warp = role.thread() / 32u;
  W_SHARED w_linear<w_f32> totals[16];
  const w_index row = role.block_x();
  const w_index i1 = row;
  w_f32 h[1];
  #pragma unroll
  for (int i = 0; i < 1; ++i) h[i] = 0.0f;
  role.pdl_wait();
  role.pdl_trigger();
  #pragma unroll 1
  for (w_signed c = 0; c < 2; c += 1) {
    const w_index s = c * 256 + warp * 32u + lane;
    const w_index t = s;
    const w_f32 e2 = w_ld(in0 + (i1 * 512 + t));
    const w_f32 e3 = w_ld(in1 + (i1 * 512 + t));
    w_linear<w_f32> w6 = {t == 0u ? 0.0f : e2, e3};
    w_linear<w_f32> b5 = w_before(w6, lane);
    if (lane == 0u) totals[(c & 1) * 8 + warp] = w6;
    role.sync();
    b5 = w_before_warps<8>(totals + (c & 1) * 8, b5, warp, w6);
    const w_f32 p7 = b5.of(h[0]);
    h[0] = w6.of(h[0]);
    const w_f32 m48 = t == 0u ? e3 : w_plus(w_times(e2, p7), e3);
    {
      w_st(out0 + (i1 * 512 + t), m48);
    }
  }
}
