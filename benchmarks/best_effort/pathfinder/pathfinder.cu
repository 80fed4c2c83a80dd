// Cheapest paths from top to bottom of a grid, a column to either side at most with each row:
//   cost(r, c) = wall(r, c) + min(cost(r - 1, c - 1), cost(r - 1, c), cost(r - 1, c + 1))
// A block goes down `ROWS` rows with a strip in shared memory; what its ends do not know reaches `ROWS` columns inwards, so
// strips overlap by as many on both sides.
#ifndef ROWS
#define ROWS 32
#endif
#define THREADS 256
#define EACH 4
#define STRIP (THREADS * EACH)
#define FAR (1 << 29)

extern "C" __global__ void __launch_bounds__(THREADS)
pathfinder(const int* __restrict__ wall, const int* __restrict__ from, int* __restrict__ to, int columns, int first) {
  __shared__ int costs[2][STRIP + 2];
  const int t = threadIdx.x, start = blockIdx.x * (STRIP - 2 * ROWS) - ROWS;
  if (t < 2) costs[t][0] = costs[t][STRIP + 1] = FAR;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int c = t + j * THREADS, column = start + c;
    costs[0][c + 1] = column >= 0 && column < columns ? from[column] : FAR;
  }
  for (int r = 0; r < ROWS; ++r) {
    int steps[EACH];  // on their way while others arrive at the barrier
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int column = start + t + j * THREADS;
      steps[j] = column >= 0 && column < columns ? wall[(long long)(first + r) * columns + column] : FAR;
    }
    __syncthreads();
    const int* above = costs[r % 2];
    int* here = costs[(r + 1) % 2];
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int c = t + j * THREADS;
      here[c + 1] = min(FAR, min(above[c + 1], min(above[c], above[c + 2])) + steps[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < EACH; ++j) {  // each thread stores what it has computed itself
    const int c = t + j * THREADS, column = start + c;
    if (c >= ROWS && c < STRIP - ROWS && column < columns) to[column] = costs[ROWS % 2][c + 1];
  }
}
