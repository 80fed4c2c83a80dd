// Histogram of 16-bit values below `BINS`: counted in shared memory, then added to the histogram of all blocks.
// A thread loads `LOADS` times eight values at once, before it counts any; the last ones may be missing.
#ifndef BINS
#define BINS 1024
#endif
#define THREADS 256
#ifndef LOADS
#define LOADS 8
#endif
#define NONE 0xffffffffu

extern "C" __global__ void __launch_bounds__(THREADS) clear(unsigned* __restrict__ counts) {
  const int bin = blockIdx.x * THREADS + threadIdx.x;
  if (bin < BINS) counts[bin] = 0u;
}

extern "C" __global__ void __launch_bounds__(THREADS)
count(const unsigned short* __restrict__ values, unsigned* __restrict__ counts, int eights) {
  __shared__ unsigned own[BINS];
  const int first = blockIdx.x * (THREADS * LOADS) + threadIdx.x;
  uint4 loaded[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int at = first + i * THREADS;
    loaded[i] = at < eights ? ((const uint4*)values)[at] : make_uint4(NONE, NONE, NONE, NONE);
  }
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) own[bin] = 0u;
  __syncthreads();  // orders the loads, too
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    if (first + i * THREADS >= eights) break;
    const unsigned words[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
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
