// The vector F^H d of an iterative reconstruction of magnetic resonance images from samples off the Cartesian grid:
//   rho_k = conj(phi_k) d_k,   (F^H d)(x) = sum_k rho_k exp(2 pi i k.x)
// `rho` computes the first for all samples; in `fhd` a thread computes `VOXELS` voxels, a block's width apart. Samples are
// in shared memory there, at most `THREADS` of them: a launch adds up one chunk of k-space.
#define THREADS 128
#define VOXELS 2

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
  const float round = 12582912.0f;  // 1.5 x 2^23: a sum with it is a whole number; on the adders, not the SFU
  const int t = threadIdx.x, own = blockIdx.x * (THREADS * VOXELS) + t;
  float4 p[VOXELS];
  float re[VOXELS], im[VOXELS];
#pragma unroll
  for (int i = 0; i < VOXELS; ++i) {
    const int v = own + i * THREADS;
    p[i] = v < voxels ? position[v] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    re[i] = im[i] = 0.0f;
  }
  k_tile[t] = t < samples ? k_space[t] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  rho_tile[t] = t < samples ? product[t] : make_float2(0.0f, 0.0f);
  __syncthreads();
#pragma unroll 4
  for (int k = 0; k < THREADS; ++k) {
    const float4 s = k_tile[k];
    const float2 r = rho_tile[k];
#pragma unroll
    for (int i = 0; i < VOXELS; ++i) {
      float turns = s.x * p[i].x + s.y * p[i].y + s.z * p[i].z;
      turns -= (turns + round) - round;
      const float angle = 6.283185307f * turns;
      const float c = __cosf(angle), d = __sinf(angle);
      re[i] += r.x * c;
      re[i] -= r.y * d;
      im[i] += r.x * d;
      im[i] += r.y * c;
    }
  }
#pragma unroll
  for (int i = 0; i < VOXELS; ++i) {
    const int v = own + i * THREADS;
    if (v < voxels) image[v] = make_float2(re[i], im[i]);
  }
}
