// Sums of absolute differences of motion estimation: for each 4 x 4 block of a frame, against the block of another frame
// at every offset of up to `RANGE` pixels along x and y. Beyond its edges a frame goes on with the pixels at the edges.
// A block of threads does one macroblock of 16 x 16 pixels; both pieces of the frames are in shared memory as words.
#ifndef RANGE
#define RANGE 16
#endif
#define THREADS 256
#define SIDE (2 * RANGE + 1)
#define OFFSETS (SIDE * SIDE)
#define ROWS (16 + 2 * RANGE)
#define WORDS (ROWS / 4 + 1)  // the last one is read where offsets are no multiple of four

__device__ __forceinline__ unsigned four_pixels(const unsigned char* row, int x, int width) {
  unsigned word = 0u;
#pragma unroll
  for (int b = 0; b < 4; ++b) word |= (unsigned)row[min(max(x + b, 0), width - 1)] << (8 * b);
  return word;
}

extern "C" __global__ void __launch_bounds__(THREADS)
sad(const unsigned char* __restrict__ current, const unsigned char* __restrict__ reference,
    unsigned short* __restrict__ sums, int width, int height) {
  __shared__ unsigned window[ROWS][WORDS];
  __shared__ unsigned macroblock[16][4];
  const int t = threadIdx.x, x = blockIdx.x * 16, y = blockIdx.y * 16;
  for (int i = t; i < ROWS * WORDS; i += THREADS) {
    const int row = i / WORDS, word = i % WORDS, from = min(max(y - RANGE + row, 0), height - 1);
    window[row][word] = four_pixels(reference + (long long)from * width, x - RANGE + 4 * word, width);
  }
  if (t < 64) macroblock[t / 4][t % 4] = four_pixels(current + (long long)(y + t / 4) * width, x + t % 4 * 4, width);
  __syncthreads();
  unsigned short* out = sums + (long long)(blockIdx.y * gridDim.x + blockIdx.x) * (16 * OFFSETS);
  for (int i = t; i < 16 * OFFSETS; i += THREADS) {
    const int block = i / OFFSETS, offset = i % OFFSETS, dy = offset / SIDE, dx = offset % SIDE;
    const int row = block / 4 * 4, column = block % 4, start = dx + column * 4, shift = start % 4 * 8;
    unsigned sum = 0u;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const unsigned* words = &window[dy + row + r][start / 4];
      sum += __vsadu4(__funnelshift_r(words[0], words[1], shift), macroblock[row + r][column]);
    }
    out[i] = (unsigned short)sum;
  }
}
