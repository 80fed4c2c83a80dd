// Pair counts of the two-point angular correlation function of points on the sky: how many pairs of two catalogues
// (data-data, random-random, data-random) have an angle in each of 32 bins. Pairs within a catalogue count once.
// Every step is rounded by itself, so that the bin of a pair is the same wherever it is computed.
//
// `directions` scales points to length 1, and sets the counts to zero; a block of `pairs` does 128 x 128 pairs and adds
// what it found to the counts. There a thread counts for itself: its 32 counts are bytes of eight words of a column of its
// own, so that no two threads of a warp meet in a bank. Each of its two points has such a column, so that no byte is
// waited for.
#define BINS 32
#define THREADS 128
#define HALF (THREADS / 2)
#define WORDS (BINS / 4)

__constant__ float limits[BINS];  // cosines, falling: bin b holds limits[b] <= cosine < limits[b - 1]; the last is unused

__device__ __forceinline__ float dot(float ax, float ay, float az, float bx, float by, float bz) {
  return __fadd_rn(__fadd_rn(__fmul_rn(ax, bx), __fmul_rn(ay, by)), __fmul_rn(az, bz));
}

extern "C" __global__ void __launch_bounds__(THREADS)
directions(const float* __restrict__ data_x, const float* __restrict__ data_y, const float* __restrict__ data_z,
           const float* __restrict__ random_x, const float* __restrict__ random_y, const float* __restrict__ random_z,
           float4* __restrict__ unit, unsigned* __restrict__ counts, int points) {
  const int i = blockIdx.x * THREADS + threadIdx.x, random = blockIdx.y;
  if (random == 0 && i < 3 * BINS) counts[i] = 0u;
  if (i >= points) return;
  const float x = random ? random_x[i] : data_x[i], y = random ? random_y[i] : data_y[i],
              z = random ? random_z[i] : data_z[i], length = __fsqrt_rn(dot(x, y, z, x, y, z));
  unit[random * points + i] = make_float4(__fdiv_rn(x, length), __fdiv_rn(y, length), __fdiv_rn(z, length), 0.0f);
}

// The bin of a pair, and BINS: a binary search, whose limits are nodes of a tree (the children of node n are 2 n and 2 n + 1)
// and whose steps are signs of differences.
__device__ __forceinline__ unsigned leaf_of(float4 a, float4 b, const float* edges) {
  const float cosine = dot(a.x, a.y, a.z, b.x, b.y, b.z);
  const float middle = limits[BINS / 2 - 1];
  const float next = cosine < middle ? limits[BINS * 3 / 4 - 1] : limits[BINS / 4 - 1];
  unsigned node = 2u | __float_as_uint(__fsub_rn(cosine, middle)) >> 31;
  node = __funnelshift_r(__float_as_uint(__fsub_rn(cosine, next)), node, 31);  // 2 node + sign
#pragma unroll
  for (int level = 2; level < 5; ++level)
    node = __funnelshift_r(__float_as_uint(__fsub_rn(cosine, edges[node])), node, 31);
  return node;
}

// One more at a leaf, or `more`: byte (leaf / 8) % 4 of word leaf % 8 of a thread's column.
__device__ __forceinline__ void count(unsigned char* column, unsigned leaf, unsigned more) {
  const unsigned byte = leaf / WORDS;
  column[leaf * (4 * THREADS) - byte * (WORDS * 4 * THREADS - 1) - BINS / WORDS] += more;
}

// Block (x, y) of (2 tiles + 1, tiles): tiles of one catalogue meet those that are not before them, in the first
// tiles + 1 columns (above the diagonal of data, below it of random points), and all tiles of the other one behind.
extern "C" __global__ void __launch_bounds__(THREADS)
pairs(const float4* __restrict__ unit, unsigned* __restrict__ counts, int points) {
  __shared__ unsigned first_counts[WORDS][THREADS], second_counts[WORDS][THREADS];
  __shared__ float edges[BINS];
  __shared__ float4 tile[THREADS];
  const int t = threadIdx.x, tiles = gridDim.y, column = blockIdx.x, row = blockIdx.y;
  const int kind = column > tiles ? 2 : column <= row ? 1 : 0;
  const int left = kind == 1 ? column : row;
  const int right = kind == 2 ? column - tiles - 1 : kind == 1 ? row : column - 1;
  const float4* lefts = unit + (kind == 1 ? points : 0);
  const float4* rights = unit + (kind == 0 ? 0 : points);
  const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  // a thread has two points of the left tile, and meets one half of the right one
  const int i = left * THREADS + t % HALF, j = i + HALF, begin = right * THREADS, half = t / HALF * HALF;
  const float4 first = i < points ? lefts[i] : none, second = j < points ? lefts[j] : none;
  tile[t] = begin + t < points ? rights[begin + t] : none;
  if (t > 0 && t < BINS) {
    const int level = (t >= 2) + (t >= 4) + (t >= 8) + (t >= 16);
    edges[t] = limits[((2 * (t - (1 << level)) + 1) << (4 - level)) - 1];
  }
#pragma unroll
  for (int w = 0; w < WORDS; ++w) first_counts[w][t] = second_counts[w][t] = 0u;
  __syncthreads();
  unsigned char* first_column = (unsigned char*)&first_counts[0][t];
  unsigned char* second_column = (unsigned char*)&second_counts[0][t];
  const float4* others = tile + half;
  const int last = (left > right ? left : right) * THREADS + THREADS;
  if (last <= points && (kind == 2 || left < right)) {
#pragma unroll 4
    for (int k = 0; k < HALF; ++k) {
      const unsigned a = leaf_of(first, others[k], edges), b = leaf_of(second, others[k], edges);
      count(first_column, a, 1u);
      count(second_column, b, 1u);
    }
  } else {  // some are no pairs: beyond the last point, or counted the other way round
#pragma unroll 1
    for (int k = 0; k < HALF; ++k) {
      const int at = begin + half + k;
      const unsigned a = leaf_of(first, others[k], edges), b = leaf_of(second, others[k], edges);
      count(first_column, a, at < points && i < points && (kind == 2 || at > i));
      count(second_column, b, at < points && j < points && (kind == 2 || at > j));
    }
  }
  __syncthreads();

  // sixteen threads add the four bins of a word, two of them at a time
  unsigned even = 0u, odd = 0u;
#pragma unroll
  for (int c = 0; c < THREADS; c += 16) {
    const unsigned x = first_counts[t / 16][c + t % 16], y = second_counts[t / 16][c + t % 16];
    even += (x & 0x00FF00FFu) + (y & 0x00FF00FFu);
    odd += (x >> 8 & 0x00FF00FFu) + (y >> 8 & 0x00FF00FFu);
  }
#pragma unroll
  for (int apart = 8; apart > 0; apart /= 2) {
    even += __shfl_xor_sync(0xFFFFFFFFu, even, apart);
    odd += __shfl_xor_sync(0xFFFFFFFFu, odd, apart);
  }
  if (t % 16 < 4) {
    const unsigned sum = (t % 2 ? odd : even) >> (t % 4 / 2 * 16) & 0xFFFFu;
    if (sum > 0u) atomicAdd(&counts[kind * BINS + t % 4 * WORDS + t / 16], sum);
  }
}
