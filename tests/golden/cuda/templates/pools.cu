// test_pools CASES 3
// {"generator": "cuda", "params": [["rows", 1], ["template", "pools"]]}
// k: (18, 1, 1) x (64, 1, 1), 0 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_pools.h
extern "C" __global__ void __launch_bounds__(64) k(const w_f32* in0, w_f32* __restrict__ out0,
    w_f32* __restrict__ out1) {
  static constexpr w_solo role{};
  W_SHARED w_chunk<16> plane[36];
  W_SHARED w_chunk<16> down[8];
  const unsigned part = role.block_x() % 9u, chunk = role.block_x() / 9u % 2u;
  const unsigned image = role.block_x() / 18u, first = part;
  role.pdl_wait();
  role.pdl_trigger();
  #pragma unroll 4
  for (unsigned p = role.thread(); p < 36u; p += 64u) {
    const w_chunk<16> c = *(const w_chunk<16>*)(in0 + ((image * 36u + p) * 8u + chunk * 4u));
    plane[p] = c;
  }
  role.sync();
  for (unsigned q = role.thread(); q < 64u; q += 64u) {
    const unsigned i = q / 32u, p = q % 32u, y = p / 4u, x = p % 4u;
    if (p >= 4u || first + y >= 9u) continue;
    if (i == 0u) {
      down[p] = w_greatest<w_f32, 2, 4>(plane + x, (int)(first + y), 9);
    } else {
      down[4u + p] = w_greatest<w_f32, 1, 4>(plane + x, (int)(first + y), 9);
    }
  }
  role.sync();
  for (unsigned q = role.thread(); q < 64u; q += 64u) {
    const unsigned i = q / 32u, p = q % 32u, y = p / 4u, x = p % 4u;
    if (p >= 4u || first + y >= 9u) continue;
    if (i == 0u) {
      const w_chunk<16> c = w_greatest<w_f32, 2, 1>(down + (y * 4u), (int)x, 4);
      *(w_chunk<16>*)(out0 + ((((image * 9u + first + y) * 4u + x) * 8u) + (chunk * 4u))) = c;
    } else {
      const w_chunk<16> c = w_greatest<w_f32, 1, 1>(down + 4 + (y * 4u), (int)x, 4);
      *(w_chunk<16>*)(out1 + ((((image * 9u + first + y) * 4u + x) * 8u) + (chunk * 4u))) = c;
    }
  }
}
