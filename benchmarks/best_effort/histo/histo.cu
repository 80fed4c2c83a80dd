// Histogram of 16-bit values below `BINS`: counted in shared memory, then added to the histogram of all blocks.
// A thread reads `LOADS` times eight values; the last ones may be missing.
#ifndef BINS
#define BINS 4096
#endif
#define THREADS 512
#ifndef LOADS
#define LOADS 64
#endif

extern "C" __global__ void __launch_bounds__(THREADS) clear(unsigned* __restrict__ counts) {
  const int bin = blockIdx.x * THREADS + threadIdx.x;
  if (bin < BINS) counts[bin] = 0u;
}

extern "C" __global__ void __launch_bounds__(THREADS)
count(const unsigned short* __restrict__ values, unsigned* __restrict__ counts, int eights) {
  __shared__ unsigned own[BINS];
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) own[bin] = 0u;
  __syncthreads();
  const int first = blockIdx.x * (THREADS * LOADS) + threadIdx.x;
#pragma unroll 4
  for (int i = 0; i < LOADS; ++i) {
    const int at = first + i * THREADS;
    if (at >= eights) break;
    const uint4 eight = ((const uint4*)values)[at];
    const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      atomicAdd(&own[words[j] & 0xffffu], 1u);
      atomicAdd(&own[words[j] >> 16], 1u);
    }
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS)
    if (own[bin]) atomicAdd(&counts[bin], own[bin]);
}
