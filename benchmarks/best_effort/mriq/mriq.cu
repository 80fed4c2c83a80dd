// The Q vector of an iterative reconstruction of magnetic resonance images from samples off the Cartesian grid:
//   Q(x) = sum_k w_k exp(2 pi i k.x)
// A thread computes one voxel. The phase is reduced to half a turn first, where the fast sine and cosine are accurate.
#ifndef SAMPLES
#define SAMPLES 2048
#endif

__constant__ float4 samples[SAMPLES];  // kx, ky, kz in cycles per voxel; w

extern "C" __global__ void __launch_bounds__(256)
mriq(const float* __restrict__ x, const float* __restrict__ y, const float* __restrict__ z, float* __restrict__ q_real,
     float* __restrict__ q_imag, int voxels) {
  const int v = blockIdx.x * blockDim.x + threadIdx.x;
  if (v >= voxels) return;
  const float px = x[v], py = y[v], pz = z[v];
  float re = 0.0f, im = 0.0f;
#pragma unroll 4
  for (int k = 0; k < SAMPLES; ++k) {
    const float4 s = samples[k];
    float turns = s.x * px + s.y * py + s.z * pz;
    turns -= rintf(turns);
    const float angle = 6.283185307f * turns;
    re += s.w * __cosf(angle);
    im += s.w * __sinf(angle);
  }
  q_real[v] = re;
  q_imag[v] = im;
}
