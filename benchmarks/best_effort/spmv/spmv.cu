// y = A x of a sparse matrix in the ELLPACK-R format: row r has lengths[r] <= `ENTRIES` entries, entry k of all rows lies
// side by side at k * rows + r, so that a warp of 32 rows reads whole lines. A thread computes one row: it loads columns and
// values of all entries at once, also where the row has fewer, and then what they want of x. A fence keeps the compiler
// from putting loads off (`__restrict__` would undo it).
#ifndef ENTRIES
#define ENTRIES 16
#endif

extern "C" __global__ void __launch_bounds__(256)
spmv(const float* values, const int* columns, const int* lengths, const float* x, float* y, int rows) {
  const int r = blockIdx.x * 256 + threadIdx.x;
  if (r >= rows) return;
  const int length = lengths[r];
  int column[ENTRIES];
  float value[ENTRIES];
#pragma unroll
  for (int k = 0; k < ENTRIES; ++k) column[k] = columns[k * rows + r];  // less than 2^31 in all
#pragma unroll
  for (int k = 0; k < ENTRIES; ++k) value[k] = values[k * rows + r];
  __threadfence_block();
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < ENTRIES; ++k)
    if (k < length) sum += value[k] * x[column[k]];
  y[r] = sum;
}
