// test_text TEXTS large
// {"generator": "cuda", "params": [["cluster", 1], ["columns", 0], ["fuse", true], ["items", 1], ["keep", true], ["per_row", 0], ["spread", 0], ["threads", 256], ["tile", false], ["vector", 4]]}
// k: (1172, 1, 1) x (256, 1, 1), 0 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
extern "C" __global__ void __launch_bounds__(256) k(const w_f32* in0, w_f32* __restrict__ out0) {
  static constexpr w_solo role{};
  {
    const w_index t = role.block_x() * (w_index)256 + role.thread();
    role.pdl_wait();
    role.pdl_trigger();
    if (t < 300007u) {
      const w_index i0_0 = t;
      const w_f32 e1 = w_ld(in0 + (i0_0));
      const w_f32 e2 = (e1 * 3.0f);
      {
        w_st(out0 + (i0_0), e2);
      }
    }
  }
}
