// Sums of absolute differences of motion estimation: for each 4 x 4 block of a frame, against the block of another frame
// at every offset of up to `RANGE` pixels along x and y. Beyond its edges a frame goes on with the pixels at the edges.
// A block of threads does one macroblock of 16 x 16 pixels; both pieces of the frames are in shared memory as words. A
// thread takes a third of a column of offsets, so that a row of the window is read once for the four rows it meets.
#ifndef RANGE
#define RANGE 16  // a multiple of four, and one more than a multiple of three: 4, 16, 28
#endif
#define THREADS 256
#define SIDE (2 * RANGE + 1)
#define THIRD (SIDE / 3)
#define OFFSETS (SIDE * SIDE)
#define ROWS (16 + 2 * RANGE)
#define WORDS (ROWS / 4 + 1)  // the last one is read where offsets are no multiple of four
#define WINDOW (ROWS * WORDS)
#define LOADS ((WINDOW + THREADS - 1) / THREADS)  // of a thread

extern "C" __global__ void __launch_bounds__(THREADS)
sad(const unsigned char* __restrict__ current, const unsigned char* __restrict__ reference,
    unsigned short* __restrict__ sums, int width, int height) {
  __shared__ unsigned window[ROWS][WORDS];
  __shared__ unsigned macroblock[16][4];
  const int t = threadIdx.x, across = width / 4, y = blockIdx.y * 16;
  const unsigned mine = ((const unsigned*)current)[(y + t % 64 / 4) * across + blockIdx.x * 4 + t % 4];
  unsigned fours[LOADS];
#pragma unroll
  for (int n = 0; n < LOADS; ++n) {
    const int i = min(t + n * THREADS, WINDOW - 1), word = blockIdx.x * 4 - RANGE / 4 + i % WORDS;
    const unsigned* row = (const unsigned*)reference + min(max(y - RANGE + i / WORDS, 0), height - 1) * across;
    const unsigned four = row[min(max(word, 0), across - 1)];
    fours[n] = __byte_perm(four, 0u, word < 0 ? 0x0000 : word >= across ? 0x3333 : 0x3210);
  }
  if (t < 64) macroblock[t / 4][t % 4] = mine;
#pragma unroll
  for (int n = 0; n < LOADS; ++n)
    if (t + n * THREADS < WINDOW) (&window[0][0])[t + n * THREADS] = fours[n];
  __syncthreads();
  unsigned short* out = sums + (long long)(blockIdx.y * gridDim.x + blockIdx.x) * (16 * OFFSETS);
  for (int i = t; i < 16 * 3 * SIDE; i += THREADS) {
    const int dx = i % SIDE, block = i / SIDE / 3, dy = i / SIDE % 3 * THIRD;
    const int row = block / 4 * 4, column = block % 4, shift = dx % 4 * 8;
    unsigned own[4], sum[THIRD] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) own[r] = macroblock[row + r][column];
#pragma unroll
    for (int r = 0; r < THIRD + 3; ++r) {
      const unsigned* words = &window[row + dy + r][column + dx / 4];
      const unsigned four = __funnelshift_r(words[0], words[1], shift);
#pragma unroll
      for (int k = 0; k < 4; ++k)  // row k of the block at offset dy + r - k
        if (r - k >= 0 && r - k < THIRD) sum[r - k] += __vsadu4(four, own[k]);
    }
    unsigned short* to = out + block * OFFSETS + dy * SIDE + dx;
#pragma unroll
    for (int k = 0; k < THIRD; ++k) to[k * SIDE] = (unsigned short)sum[k];
  }
}
