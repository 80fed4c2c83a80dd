// Pair counts of the two-point angular correlation function of points on the sky: how many pairs of two catalogues
// (data-data, random-random, data-random: blockIdx.z) have an angle in each of 32 bins. Pairs within a catalogue count once.
// Every step is rounded by itself, so that the bin of a pair is the same wherever it is computed.
#define BINS 32
#define THREADS 256
#define WARPS (THREADS / 32)
#ifndef TILES
#define TILES 4
#endif

__constant__ float limits[BINS];  // cosines, falling: bin b holds limits[b] <= cosine < limits[b - 1]; the last is unused

__device__ __forceinline__ float dot(float ax, float ay, float az, float bx, float by, float bz) {
  return __fadd_rn(__fadd_rn(__fmul_rn(ax, bx), __fmul_rn(ay, by)), __fmul_rn(az, bz));
}

__device__ __forceinline__ float4 direction(const float* x, const float* y, const float* z, int i) {
  const float px = x[i], py = y[i], pz = z[i], length = __fsqrt_rn(dot(px, py, pz, px, py, pz));
  return make_float4(__fdiv_rn(px, length), __fdiv_rn(py, length), __fdiv_rn(pz, length), 0.0f);
}

extern "C" __global__ void __launch_bounds__(THREADS)
pairs(const float* __restrict__ data_x, const float* __restrict__ data_y, const float* __restrict__ data_z,
      const float* __restrict__ random_x, const float* __restrict__ random_y, const float* __restrict__ random_z,
      unsigned* __restrict__ partial, int points) {
  __shared__ unsigned counts[WARPS][BINS];
  __shared__ float edges[BINS];
  __shared__ float4 tile[THREADS];
  const int t = threadIdx.x, kind = blockIdx.z, i = blockIdx.x * THREADS + t;
  const bool left_random = kind == 1, right_random = kind != 0, within = kind != 2;
  for (int b = t; b < WARPS * BINS; b += THREADS) counts[b / BINS][b % BINS] = 0u;
  if (t < BINS) edges[t] = limits[t];
  float4 own = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (i < points)
    own = left_random ? direction(random_x, random_y, random_z, i) : direction(data_x, data_y, data_z, i);
  unsigned* mine = counts[t / 32];
  for (int n = 0; n < TILES; ++n) {
    const int first = (blockIdx.y * TILES + n) * THREADS;
    if (first >= points) break;
    if (within && first + THREADS <= blockIdx.x * THREADS) continue;  // these pairs were counted the other way round
    __syncthreads();
    if (first + t < points)
      tile[t] = right_random ? direction(random_x, random_y, random_z, first + t)
                             : direction(data_x, data_y, data_z, first + t);
    __syncthreads();
    const int end = min(THREADS, points - first);
    for (int k = 0; k < end; ++k) {
      const float4 other = tile[k];
      const float cosine = dot(own.x, own.y, own.z, other.x, other.y, other.z);
      int bin = 0;
#pragma unroll
      for (int step = BINS / 2; step > 0; step /= 2)
        if (cosine < edges[bin + step - 1]) bin += step;
      if (i < points && (!within || first + k > i)) atomicAdd(&mine[bin], 1u);
    }
  }
  __syncthreads();
  if (t < BINS) {
    unsigned sum = 0u;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += counts[w][t];
    partial[((kind * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * BINS + t] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
total(const unsigned* __restrict__ partial, unsigned* __restrict__ counts, int blocks) {
  __shared__ unsigned sums[WARPS][BINS];
  const int bin = threadIdx.x % BINS, group = threadIdx.x / BINS;
  unsigned sum = 0u;
  for (int b = group; b < blocks; b += WARPS) sum += partial[(blockIdx.x * blocks + b) * BINS + bin];
  sums[group][bin] = sum;
  __syncthreads();
  if (group == 0) {
    for (int g = 1; g < WARPS; ++g) sum += sums[g][bin];
    counts[blockIdx.x * BINS + bin] = sum;
  }
}
