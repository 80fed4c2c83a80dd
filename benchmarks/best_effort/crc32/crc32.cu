// Cyclic redundancy checks (CRC-32 of Ethernet: reflected polynomial 0xEDB88320) of many messages of one length.
// A thread does one message, four bytes at a time by four tables that the block computes first. Pieces of 64 bytes of all
// its messages come through shared memory, so that they are read in whole lines.
#ifndef LENGTH
#define LENGTH 1024
#endif
#define THREADS 128
#define PIECE 16  // words

extern "C" __global__ void __launch_bounds__(THREADS)
crc32(const unsigned* __restrict__ messages, unsigned* __restrict__ checks, int count) {
  __shared__ unsigned tables[4][256];
  __shared__ unsigned pieces[THREADS][PIECE + 1];
  const int t = threadIdx.x, first = blockIdx.x * THREADS;
  for (int b = t; b < 256; b += THREADS) {
    unsigned c = b;
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) c = c >> 1 ^ (c & 1u ? 0xEDB88320u : 0u);
    tables[0][b] = c;
  }
  for (int n = 1; n < 4; ++n) {
    __syncthreads();
    for (int b = t; b < 256; b += THREADS) {
      const unsigned before = tables[n - 1][b];
      tables[n][b] = before >> 8 ^ tables[0][before & 255u];
    }
  }
  unsigned c = ~0u;
  for (int word = 0; word < LENGTH / 4; word += PIECE) {
    __syncthreads();
#pragma unroll 4
    for (int i = t; i < THREADS * PIECE; i += THREADS) {
      const int message = i / PIECE, at = i % PIECE;
      if (first + message < count)
        pieces[message][at] = messages[(long long)(first + message) * (LENGTH / 4) + word + at];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
      c ^= pieces[t][i];
      c = tables[3][c & 255u] ^ tables[2][c >> 8 & 255u] ^ tables[1][c >> 16 & 255u] ^ tables[0][c >> 24];
    }
  }
  if (first + t < count) checks[first + t] = ~c;
}
