// The vector F^H d of an iterative reconstruction of magnetic resonance images from samples off the Cartesian grid:
//   rho_k = conj(phi_k) d_k,   (F^H d)(x) = sum_k rho_k exp(2 pi i k.x)
// `rho` computes the first for all samples; in `fhd` a thread computes one voxel, and samples come through shared memory.
#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS)
rho(const float2* __restrict__ phi, const float2* __restrict__ data, float2* __restrict__ product, int samples) {
  const int k = blockIdx.x * THREADS + threadIdx.x;
  if (k >= samples) return;
  const float2 p = phi[k], d = data[k];
  product[k] = make_float2(p.x * d.x + p.y * d.y, p.x * d.y - p.y * d.x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fhd(const float4* __restrict__ position, const float4* __restrict__ k_space, const float2* __restrict__ product,
    float2* __restrict__ image, int voxels, int samples) {
  __shared__ float4 k_tile[THREADS];
  __shared__ float2 rho_tile[THREADS];
  const int t = threadIdx.x, v = blockIdx.x * THREADS + t;
  const float4 p = v < voxels ? position[v] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float re = 0.0f, im = 0.0f;
  for (int first = 0; first < samples; first += THREADS) {
    const bool there = first + t < samples;
    k_tile[t] = there ? k_space[first + t] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    rho_tile[t] = there ? product[first + t] : make_float2(0.0f, 0.0f);
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < THREADS; ++k) {
      const float4 s = k_tile[k];
      const float2 r = rho_tile[k];
      float turns = s.x * p.x + s.y * p.y + s.z * p.z;
      turns -= rintf(turns);
      const float angle = 6.283185307f * turns;
      const float c = __cosf(angle), d = __sinf(angle);
      re += r.x * c - r.y * d;
      im += r.x * d + r.y * c;
    }
    __syncthreads();
  }
  if (v < voxels) image[v] = make_float2(re, im);
}
