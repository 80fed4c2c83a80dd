// y = A x of a sparse matrix in the ELLPACK-R format: row r has lengths[r] entries, entry k of all rows lies side by side
// at k * rows + r, so that a warp of 32 rows reads whole lines. A thread computes one row.
extern "C" __global__ void __launch_bounds__(256)
spmv(const float* __restrict__ values, const int* __restrict__ columns, const int* __restrict__ lengths,
     const float* __restrict__ x, float* __restrict__ y, int rows) {
  const int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  const int length = lengths[r];
  float sum = 0.0f;
#pragma unroll 4
  for (int k = 0; k < length; ++k) {
    const long long at = (long long)k * rows + r;
    sum += values[at] * x[columns[at]];
  }
  y[r] = sum;
}
