// test_layered CASES one row
// "layered"
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
#define W_EARLY 0
#undef W_MMA
#define W_MMA w_mma_bf16
#undef W_NARROW2
#define W_NARROW2 w_narrow2_bf16
#undef W_UNPACK
#define W_UNPACK w_unpack_bf16
// weft_cuda_training.h
// weft_cuda_layered.h
struct Last {
  enum { KEEP = 0 };
  static W_FN float of(float z) { return z; }
  static W_FN u32 both(float z, float y) { return w_narrow2_bf16(of(z), of(y)); }
  static W_FN float back(float g, float z) { return g; }
};
extern "C" __global__ void __launch_bounds__(256) k_pack(const void* p0, const void* p1, const void* p2, const void* p3,
    void* image_) {
  static constexpr w_solo role{};
  role.pdl_wait();
  role.pdl_trigger();
  __shared__ u16 held[32][33];
  char* const image = (char*)image_;
  int b = role.block_x();
  const int t = role.thread();
  if (b < 1) {
    w_images<24, 16, 24, 16, 16, 16>(role, (const u16*)p0, (u16*)(image), (u16*)(image + 768), b, held, t);
    return;
  }
  b -= 1;
  if (b == 0) {
    for (int i = t; i < 24; i += 256) {
      u16 v = 0;
      if (i < 24) v = w_short(((const u16*)p1)[i]);
      ((u16*)(image + 1536))[i] = v;
    }
    return;
  }
  --b;
  if (b < 1) {
    w_images<8, 24, 8, 24, 24, 24>(role, (const u16*)p2, (u16*)(image + 1664), (u16*)(image + 2048), b, held, t);
    return;
  }
  b -= 1;
  if (b == 0) {
    for (int i = t; i < 8; i += 256) {
      u16 v = 0;
      if (i < 8) v = w_short(((const u16*)p3)[i]);
      ((u16*)(image + 2432))[i] = v;
    }
    return;
  }
  --b;
}
extern "C" __global__ void __launch_bounds__(256) k_ending(const void* dy_, const void* kept_, void* dz_,
    const void* rows_) {
  static constexpr w_solo role{};
  role.pdl_wait();
  role.pdl_trigger();
  w_ending<Last, 8, 8>((const u16*)dy_, (const u16*)kept_, (u16*)dz_, (u32)(u64)rows_,
      role.block_x() * 256u + role.thread(), role.blocks_x() * 256u);
}
extern "C" __global__ void __launch_bounds__(256) k_columns(const void* dz_, void* partial_, const void* rows_,
    const void* columns_, const void* sums_) {
  static constexpr w_solo role{};
  role.pdl_wait();
  role.pdl_trigger();
  __shared__ float held[2048];
  const w_rows rows = (w_rows)(u64)rows_;
  const int columns = (int)(u64)columns_;
  const w_rows first = rows * role.block_x() / role.blocks_x();
  const w_rows last = rows * (role.block_x() + 1) / role.blocks_x();
  float* const out = (float*)partial_ + (w_rows)role.block_x() * columns;
  if (columns == 8) {
    if (sums_) w_column_sums<8>(role, (const float*)dz_, out, first, last, held, role.thread());
    else w_column_sums<8>(role, (const u16*)dz_, out, first, last, held, role.thread());
  }
  if (columns == 24) {
    if (sums_) w_column_sums<24>(role, (const float*)dz_, out, first, last, held, role.thread());
    else w_column_sums<24>(role, (const u16*)dz_, out, first, last, held, role.thread());
  }
}
extern "C" __global__ void __launch_bounds__(256) k_total(const void* partial_, void* out_, const void* shares_) {
  static constexpr w_solo role{};
  role.pdl_wait();
  role.pdl_trigger();
  __shared__ float eighths[8][32];
  const int shares = (int)(u64)shares_, lane = role.thread() % 32, part = role.thread() / 32;
  int b = role.block_x(), to = -1, step = 0;
  const float* from = 0;
  if (b >= 0 && b < 1) {
    step = 24;
    from = (const float*)partial_ + b * 32 + lane;
    if (b * 32 + lane < 24) to = 384 + b * 32 + lane;
  }
  b -= 1;
  if (b >= 0 && b < 1) {
    step = 8;
    from = (const float*)partial_ + (w_rows)shares * 24 + b * 32 + lane;
    if (b * 32 + lane < 8) to = 600 + b * 32 + lane;
  }
  b -= 1;
  float s = 0.0f;
  const int end = shares * (part + 1) / 8;
  if (to >= 0)
    #pragma unroll 8
    for (int p = shares * part / 8; p < end; ++p) s += from[(w_rows)p * step];
  eighths[part][lane] = s;
  role.sync();
  if (part == 0 && to >= 0) {
    #pragma unroll
    for (int p = 1; p < 8; ++p) s += eighths[p][lane];
    ((float*)out_)[to] = s;
  }
}
