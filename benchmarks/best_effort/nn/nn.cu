// The record nearest to a place: distances of all records, then the least of them with its number. Distances are no
// negative numbers, so their bits are in their order; with the number below them they are one key. `count` is a multiple of
// four. What a thread loads is under way together: fences keep the compiler from putting loads off (`__restrict__` would
// undo it).
#define THREADS 256
#ifndef FOURS
#define FOURS 8
#endif
#ifndef PAIRS
#define PAIRS 8
#endif

__device__ __forceinline__ float apart(float of_x, float of_y, float x, float y) {
  const float dx = __fsub_rn(of_x, x), dy = __fsub_rn(of_y, y);
  return __fsqrt_rn(__fadd_rn(__fmul_rn(dx, dx), __fmul_rn(dy, dy)));
}

// A thread takes `PAIRS` times two records.
extern "C" __global__ void __launch_bounds__(THREADS)
distance(const float2* records, float* distances, unsigned long long* nearest, int count, float x, float y) {
  const int pairs = count / 2, first = blockIdx.x * (THREADS * PAIRS) + threadIdx.x;
  if (first == 0) *nearest = ~0ull;
  float4 loaded[PAIRS];
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) loaded[n] = ((const float4*)records)[min(first + n * THREADS, pairs - 1)];
  __threadfence_block();
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int i = first + n * THREADS;
    if (i >= pairs) return;
    const float4 two = loaded[n];
    ((float2*)distances)[i] = make_float2(apart(two.x, two.y, x, y), apart(two.z, two.w, x, y));
  }
}

// A thread takes `FOURS` times four distances.
extern "C" __global__ void __launch_bounds__(THREADS)
least(const float* distances, unsigned long long* nearest, int count) {
  __shared__ unsigned long long of_warp[THREADS / 32];
  const int t = threadIdx.x, fours = count / 4, first = blockIdx.x * (THREADS * FOURS) + t;
  float4 loaded[FOURS];
#pragma unroll
  for (int n = 0; n < FOURS; ++n) loaded[n] = ((const float4*)distances)[min(first + n * THREADS, fours - 1)];
  __threadfence_block();
  float best = loaded[0].x;
  int record = 4 * min(first, fours - 1);
#pragma unroll
  for (int n = 0; n < FOURS; ++n) {  // numbers rise, so that the first of equal ones stays
    const float four[4] = {loaded[n].x, loaded[n].y, loaded[n].z, loaded[n].w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (four[j] < best) best = four[j], record = 4 * min(first + n * THREADS, fours - 1) + j;
  }
  unsigned long long key = (unsigned long long)__float_as_uint(best) << 32 | (unsigned)record;
#pragma unroll
  for (int by = 16; by > 0; by /= 2) {
    const unsigned long long other = __shfl_down_sync(0xffffffffu, key, by);
    key = other < key ? other : key;
  }
  if (t % 32 == 0) of_warp[t / 32] = key;
  __syncthreads();
  if (t == 0) {
    for (int w = 1; w < THREADS / 32; ++w) key = of_warp[w] < key ? of_warp[w] : key;
    atomicMin(nearest, key);
  }
}
