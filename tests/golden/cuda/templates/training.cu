// test_training CASES one layer
// "gradient"
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h
// weft_cuda_mlp.h
#undef W_ONES
#define W_ONES 0x3f803f80u
#undef W_EARLY
#define W_EARLY 1
#undef W_MMA
#define W_MMA w_mma_bf16
#undef W_NARROW2
#define W_NARROW2 w_narrow2_bf16
#undef W_UNPACK
#define W_UNPACK w_unpack_bf16
// weft_cuda_training.h
struct Act0 {
  enum { KEEP = 0 };
  static W_FN float of(float z) { return z; }
  static W_FN u32 both(float z, float y) { return w_narrow2_bf16(of(z), of(y)); }
  static W_FN float back(float g, float z) { return g; }
};
extern "C" __global__ void __launch_bounds__(256) k_pack(const void* p0, const void* p1, void* image_) {
  static constexpr w_solo role{};
  role.pdl_wait();
  role.pdl_trigger();
  char* const image = (char*)image_;
  u32 i = role.block_x() * 256u + role.thread();
  if (i < 256u) {
    const u32 block = i / 64, n = block / 2 % 2 * 8 + i % 64 / 8;
    const u32 k = block / 4 * 16 + block % 2 * 8 + i % 8;
    u16 v = 0;
    if (n < 16 && k < 16) v = ((const u16*)p0)[n * 16 + k];
    ((u16*)(image))[i] = v;
    return;
  }
  i -= 256u;
  if (i < 16u) {
    ((float*)(image + 512))[i] = i < 16 ? w_unpack_bf16(((const u16*)p1)[i]).x : 0.0f;
    return;
  }
  i -= 16u;
}
extern "C" __global__ void __launch_bounds__(384, 2) k_chain(const void* x_, const void* dy_, const void* image_,
    void* kept_, void* dx_, const void* rows_) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  const int t = role.thread(), lane = t & 31, warp = t >> 5;
  role.pdl_wait();
  role.pdl_trigger();
  const char* const image = (const char*)image_;
  const u32 base = w_shared(sm);
  const w_rows rows = (w_rows)(u64)rows_, tiles = (rows + 15) / 16;
  const w_rows turns = tiles;
  (void)turns;
  for (int i = t; i < 36; i += 384) w_copy16(base + (16 * i), image + (16 * i));
  w_commit();
  w_arrived<0>();
  role.sync();
  const u16* const x = (const u16*)x_;
  const u16* const dy = (const u16*)dy_;
  const w_rows first = (w_rows)role.block_x() + (w_rows)warp * role.blocks_x();
  (void)first;
  #pragma unroll 1
  for (w_rows tile = first; tile < tiles; tile += (w_rows)role.blocks_x() * 12) {
    const bool live = true;
    const w_rows row0 = tile * 16;
    const w_rows record = 1024;
    char* const kept = (char*)kept_ + tile * record;
    u32 h0[1][1][4];
    w_read_rows<16, 16, true>(h0, x, row0, rows, lane);
    w_keep_all<1, 1>(kept, h0, record, lane, live);
    u32 g0[1][1][4];
    w_read_rows<16, 16, true>(g0, dy, row0, rows, lane);
    w_keep_all<1, 1>(kept + 512, g0, record, lane, live);
    {
      float d[1][2][4];
      w_zero<2, 1>(d);
      w_down<1, 1, 1, 0, 1>(d, g0, base, lane);
      w_input<16, 16, true, 1, u16, 1>((u16*)dx_, d, row0, rows, lane);
    }
  }
}
__device__ __align__(16) const int k_sums_at[] = {512,0,0,384};
extern "C" __global__ void __launch_bounds__(128, 2) k_sums(const void* kept_, void* partial_, const void* tiles_,
    const void* more_) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  role.pdl_wait();
  role.pdl_trigger();
  const int lane = role.thread() & 31, warp = role.thread() >> 5;
  const int number = role.block_x() / 264, slice = role.block_x() % 264;
  const int item = number;
  const w_rows tiles = (w_rows)(u64)tiles_;
  const int left = k_sums_at[4 * item], right = k_sums_at[4 * item + 1];
  float* const to = (float*)partial_ + k_sums_at[4 * item + 2] + slice * k_sums_at[4 * item + 3];
  const bool more = more_ != 0;
  const char* const kept = (const char*)kept_;
  const w_rows part = slice * 4 + warp;
  const w_rows first = tiles * part / 1056, last = tiles * (part + 1) / 1056;
  if (item >= 0 && item < 1)
    w_row_sums<1, 1, true, 4>(role, kept, 1024, left, right, first, last, to, more, sm, warp, 4, lane);
}
__device__ __align__(16) const int k_finish_at[] = {0,256,16,16,0,0};
extern "C" __global__ void __launch_bounds__(256) k_finish(const void* partial_, void* out_, const void* shares_) {
  static constexpr w_solo role{};
  const int shares = (int)(u64)shares_;
  role.pdl_wait();
  role.pdl_trigger();
  int i = role.block_x() * 32 + role.thread() % 32;
  const int part = role.thread() / 32;
  float* const out = (float*)out_;
  const float* from = 0;
  w_rows step = 0;
  int to = -1;
  if (i >= 0 && i < 384) {
    const int item = i / 384, at = i % 384, lane = at % 32, r = at / 32;
    from = (const float*)partial_ + (long long)item * shares * 384 + at;
    step = 384;
    const int* const of = k_finish_at + item * 6;
    const int g = lane >> 2, q = lane & 3;
    if (r < 8) {
      const int row = of[4] + r / 8 * 16 + r % 4 / 2 * 8 + g;
      const int column = of[5] + r / 4 % 2 * 8 + 2 * q + r % 2;
      if (row < of[2] && column < of[3]) to = of[0] + row * of[3] + column;
    } else {
      const int b = r - 8, row = of[4] + b / 4 * 16 + b % 4 / 2 * 8 + g;
      if (q == 0 && b % 2 == 0 && of[1] >= 0 && row < of[2]) to = of[1] + row;
    }
  }
  i -= 384;
  __shared__ float eighths[8][32];
  float s = 0.0f;
  const int end = shares * (part + 1) / 8;
  if (to >= 0)
    #pragma unroll 8
    for (int p = shares * part / 8; p < end; ++p) s += from[p * step];
  eighths[part][role.thread() % 32] = s;
  role.sync();
  if (part == 0 && to >= 0) {
    #pragma unroll
    for (int p = 1; p < 8; ++p) s += eighths[p][role.thread()];
    out[to] = s;
  }
}
