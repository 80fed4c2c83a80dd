// The record nearest to a place: distances of all records, then the least of them with its number. Distances are no
// negative numbers, so their bits are in their order; with the number below them they are one key.
#define THREADS 256
#ifndef ITEMS
#define ITEMS 32
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
distance(const float2* __restrict__ records, float* __restrict__ distances, unsigned long long* __restrict__ nearest,
         int count, float x, float y) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i == 0) *nearest = ~0ull;
  if (i >= count) return;
  const float2 record = records[i];
  const float dx = __fsub_rn(record.x, x), dy = __fsub_rn(record.y, y);
  distances[i] = __fsqrt_rn(__fadd_rn(__fmul_rn(dx, dx), __fmul_rn(dy, dy)));
}

extern "C" __global__ void __launch_bounds__(THREADS)
least(const float* __restrict__ distances, unsigned long long* __restrict__ nearest, int count) {
  __shared__ unsigned long long of_warp[THREADS / 32];
  const int t = threadIdx.x, first = blockIdx.x * (THREADS * ITEMS) + t;
  unsigned long long best = ~0ull;
#pragma unroll 4
  for (int n = 0; n < ITEMS; ++n) {
    const int i = first + n * THREADS;
    if (i < count) {
      const unsigned long long key = (unsigned long long)__float_as_uint(distances[i]) << 32 | (unsigned)i;
      best = key < best ? key : best;
    }
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) {
    const unsigned long long other = __shfl_down_sync(0xffffffffu, best, by);
    best = other < best ? other : best;
  }
  if (t % 32 == 0) of_warp[t / 32] = best;
  __syncthreads();
  if (t == 0) {
    for (int w = 1; w < THREADS / 32; ++w) best = of_warp[w] < best ? of_warp[w] : best;
    atomicMin(nearest, best);
  }
}
