// Cheapest paths from top to bottom of a grid, a column to either side at most with each row:
//   cost(r, c) = wall(r, c) + min(cost(r - 1, c - 1), cost(r - 1, c), cost(r - 1, c + 1))
// A warp goes down `ROWS` rows with a strip of 256 columns in registers, eight of each thread; what its ends do not know
// reaches `ROWS` columns inwards, so strips overlap by as many on both sides. Warps share nothing. `columns` and `ROWS` are
// multiples of four. A fence keeps the compiler from putting loads off (`__restrict__` would undo it).
#ifndef ROWS
#define ROWS 8
#endif
#define THREADS 256
#define EACH 8
#define STRIP (32 * EACH)
#define FAR (1 << 29)
#define BATCH 4  // rows whose loads are under way together

// Eight numbers of a row from column `at` on, which is a multiple of four; FAR outside of the row.
__device__ __forceinline__ void load(int* to, const int* row, int at, int columns) {
#pragma unroll
  for (int h = 0; h < EACH; h += 4) {
    const bool there = at + h >= 0 && at + h < columns;
    const int4 four = there ? *(const int4*)(row + at + h) : make_int4(FAR, FAR, FAR, FAR);
    to[h] = four.x, to[h + 1] = four.y, to[h + 2] = four.z, to[h + 3] = four.w;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
pathfinder(const int* wall, const int* from, int* to, int columns, int first) {
  const int lane = threadIdx.x % 32, strip = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  const int inner = lane * EACH, at = strip * (STRIP - 2 * ROWS) - ROWS + inner;
  const int* row = wall + (long long)first * columns;
  int cost[EACH], steps[BATCH][EACH];
  load(cost, from, at, columns);
#pragma unroll
  for (int r = 0; r < ROWS; r += BATCH) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) load(steps[i], row + (long long)(r + i) * columns, at, columns);
    __threadfence_block();
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      int west = __shfl_up_sync(0xffffffffu, cost[EACH - 1], 1), east = __shfl_down_sync(0xffffffffu, cost[0], 1);
      if (lane == 0) west = FAR;
      if (lane == 31) east = FAR;
#pragma unroll
      for (int c = 0; c < EACH; ++c) {
        const int here = cost[c], least = min(min(west, here), c + 1 < EACH ? cost[c + 1] : east);
        cost[c] = min(FAR, least + steps[i][c]);
        west = here;
      }
    }
  }
#pragma unroll
  for (int h = 0; h < EACH; h += 4)
    if (inner + h >= ROWS && inner + h < STRIP - ROWS && at + h < columns)
      *(int4*)(to + at + h) = make_int4(cost[h], cost[h + 1], cost[h + 2], cost[h + 3]);
}
