// D = alpha A B + beta C in single precision; A is m by k, B is k by n, C and D are m by n, all row-major.
// m and n are multiples of 64, k of 16; none of the matrices has 2^31 numbers. A block computes 64 x 64 results, a thread 8 x 4 of them; the next tiles of A and
// B are on their way in registers while those in shared memory are multiplied.
#define TILE 64
#define DEPTH 16
#define THREADS 128

extern "C" __global__ void __launch_bounds__(THREADS, 6)
sgemm(const float* __restrict__ a, const float* __restrict__ b, const float* __restrict__ c, float* __restrict__ d,
      int n, int k, float alpha, float beta) {
  __shared__ float4 a_tile[2][DEPTH][TILE / 4 + 1];  // transposed; the last column keeps stores off each other's banks
  __shared__ float4 b_tile[2][DEPTH][TILE / 4];
  const int t = threadIdx.x, row = t / 16, column = t % 16;
  const int a_row = t / 4, a_depth = t % 4 * 4, b_row = t / 16, b_column = t % 16;
  const float* a_from = a + (blockIdx.y * TILE + a_row) * k + a_depth;
  int b_from = b_row * n + blockIdx.x * TILE + b_column * 4;
  float4 a_next[2], b_next[2];
  float sums[8][4];
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i][j] = 0.0f;

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    a_next[i] = *(const float4*)(a_from + 32 * i * k);
    b_next[i] = *(const float4*)(b + b_from + 8 * i * n);
  }
  int now = 0;
  for (int first = 0; first < k; first += DEPTH) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* to = (float*)a_tile[now][a_depth] + a_row + 32 * i;
      to[0] = a_next[i].x;
      to[TILE + 4] = a_next[i].y;
      to[2 * (TILE + 4)] = a_next[i].z;
      to[3 * (TILE + 4)] = a_next[i].w;
      b_tile[now][b_row + 8 * i][b_column] = b_next[i];
    }
    __syncthreads();
    if (first + DEPTH < k) {
      a_from += DEPTH;
      b_from += DEPTH * n;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a_next[i] = *(const float4*)(a_from + 32 * i * k);
        b_next[i] = *(const float4*)(b + b_from + 8 * i * n);
      }
    }
#pragma unroll
    for (int q = 0; q < DEPTH; ++q) {
      const float4 a0 = a_tile[now][q][row], a1 = a_tile[now][q][row + 8], b0 = b_tile[now][q][column];
      const float left[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
      const float right[4] = {b0.x, b0.y, b0.z, b0.w};
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] += left[i] * right[j];
    }
    now ^= 1;  // the other tiles were last read before the barrier above
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = (blockIdx.y * TILE + half * 32 + row * 4) * n + blockIdx.x * TILE + column * 4;
    float4 old[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) old[i] = *(const float4*)(c + at + i * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* sum = sums[half * 4 + i];
      *(float4*)(d + at + i * n) =
          make_float4(alpha * sum[0] + beta * old[i].x, alpha * sum[1] + beta * old[i].y,
                      alpha * sum[2] + beta * old[i].z, alpha * sum[3] + beta * old[i].w);
    }
  }
}
