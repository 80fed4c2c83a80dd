// Work for one unit of a multiprocessor: multiply-adds, exponentials, reads of memory, atomics in shared memory.
// Blocks are independent, of `THREADS` threads and `REPEATS` turns; each counts itself in `ran`, so that a block that was
// lost or ran twice is seen. What they store does not depend on which block stores it.
#ifndef THREADS
#define THREADS 256
#endif
#ifndef REPEATS
#define REPEATS 1
#endif
#define CELLS 4096
#ifdef STAMPED  // the latest time at which a warp ended lies behind the cells
#define STAMP() \
  if (threadIdx.x % 32 == 0) { \
    unsigned long long now; \
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); \
    atomicMax((unsigned long long*)(ran + CELLS), now); \
  }
#else
#define STAMP()
#endif

// 8 multiply-adds in a turn: a warp issues one in some three clocks, and leaves the others to its neighbours
extern "C" __global__ void __launch_bounds__(THREADS) ffma(unsigned* ran, float* out) {
  float a[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) a[j] = (float)(threadIdx.x + j);
#pragma unroll 1
  for (int i = 0; i < REPEATS; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) a[j] = fmaf(a[j], 0.999f, 0.5f);
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += a[j];
  out[threadIdx.x] = sum;
  if (threadIdx.x == 0) atomicAdd(&ran[blockIdx.x % CELLS], 1u);
  STAMP()
}

// 64 in a turn: one warp takes two thirds of what a quarter of an SM can issue, two take all of it
extern "C" __global__ void __launch_bounds__(THREADS) dense(unsigned* ran, float* out) {
  float a[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) a[j] = (float)(threadIdx.x + j);
#pragma unroll 1
  for (int i = 0; i < REPEATS; ++i) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) a[j] = fmaf(a[j], 0.999f, 0.5f);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += a[j];
  out[threadIdx.x] = sum;
  if (threadIdx.x == 0) atomicAdd(&ran[blockIdx.x % CELLS], 1u);
  STAMP()
}

extern "C" __global__ void __launch_bounds__(THREADS) exponentials(unsigned* ran, float* out) {
  float a[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) a[j] = (float)(threadIdx.x + j) * 0.001f;
#pragma unroll 1
  for (int i = 0; i < REPEATS; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(a[j]) : "f"(-a[j]));
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += a[j];
  out[threadIdx.x] = sum;
  if (threadIdx.x == 0) atomicAdd(&ran[blockIdx.x % CELLS], 1u);
  STAMP()
}

// reads THREADS * REPEATS * 4 pieces of 16 bytes, behind those of the block before
extern "C" __global__ void __launch_bounds__(THREADS) streaming(const uint4* data, unsigned* ran, unsigned* out, int pieces) {
  unsigned at = (unsigned)(((unsigned long long)blockIdx.x * (THREADS * 4 * REPEATS)) % (unsigned)pieces) + threadIdx.x;
  if (at >= (unsigned)pieces) at -= (unsigned)pieces;
  unsigned sum = 0;
#pragma unroll 1
  for (int i = 0; i < REPEATS; ++i) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j] = __ldcs(&data[at]);
      at += THREADS;
      if (at >= (unsigned)pieces) at -= (unsigned)pieces;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x9e3779b9u) out[0] = sum;
  if (threadIdx.x == 0) atomicAdd(&ran[blockIdx.x % CELLS], 1u);
  STAMP()
}

// counts bytes: 16 of a thread in a turn, behind those of the block before
extern "C" __global__ void __launch_bounds__(THREADS) histogram(const uint4* data, unsigned* ran, unsigned* counts, int pieces) {
  __shared__ unsigned own[256];
  for (int bin = threadIdx.x; bin < 256; bin += THREADS) own[bin] = 0u;
  __syncthreads();
  unsigned at = (unsigned)(((unsigned long long)blockIdx.x * (THREADS * REPEATS)) % (unsigned)pieces) + threadIdx.x;
  if (at >= (unsigned)pieces) at -= (unsigned)pieces;
#pragma unroll 1
  for (int i = 0; i < REPEATS; ++i) {
    const uint4 piece = data[at];
    const unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int k = 0; k < 32; k += 8) atomicAdd(&own[words[j] >> k & 255u], 1u);
    }
    at += THREADS;
    if (at >= (unsigned)pieces) at -= (unsigned)pieces;
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < 256; bin += THREADS) atomicAdd(&counts[bin], own[bin]);
  if (threadIdx.x == 0) atomicAdd(&ran[blockIdx.x % CELLS], 1u);
  STAMP()
}
