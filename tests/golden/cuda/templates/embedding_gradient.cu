// test_embedding_gradient CASES padding
// {"generator": "cuda", "params": [["lanes", 8], ["template", "embedding_gradient"], ["width", 4]]}
// k: (4, 1, 1) x (256, 1, 1), 1536 bytes
// k_summed: (1, 1, 1) x (256, 1, 1), 12296 bytes
// weft_cuda_machine.h
// weft_cuda.h
// weft_cuda_role.h
// weft_cuda_tensor.h
// weft_cuda_rough.h
// weft_cuda_end.h

// how many of n ascending numbers are less than a key, of which `from` are known to be
W_FN int w_below(const u32* numbers, int from, int n, u32 key) {
  while (from < n) {
    const int middle = (from + n) >> 1;
    if (numbers[middle] < key) from = middle + 1;
    else n = middle;
  }
  return from;
}
extern "C" __global__ void __launch_bounds__(256) k(const void* __restrict__ in1, void* __restrict__ work) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  const int t = role.thread(), lane = t % 32, part = t / 32;
  u32* const keys = (u32*)sm;
  u32* const counts = keys + 128;
  role.pdl_wait();
  role.pdl_trigger();
  for (int j = t; j < 128; j += 256) {
    const long long x = j < 120 ? ((const long long*)in1)[j] : 0;
    keys[j] = j >= 120 ? 0xffffffffu : x < 0 || x >= 20 || x == 0 ? 20u : (u32)x;
  }
  role.sync();
  const int i = role.block_x() * 32 + lane;
  const u32 own = keys[i];
  u32 before = 0;
  #pragma unroll 4
  for (int j = part * 16; j < (part + 1) * 16; j += 4) {
    const uint4 k = *(const uint4*)(keys + j);
    before += k.x < own + (u32)(j < i);
    before += k.y < own + (u32)(j + 1 < i);
    before += k.z < own + (u32)(j + 2 < i);
    before += k.w < own + (u32)(j + 3 < i);
  }
  counts[t] = before;
  role.sync();
  if (t < 32 && i < 120) {
    for (int p = 1; p < 8; ++p) before += counts[t + p * 32];
    ((u32*)work)[before] = (u32)i;
    ((u32*)work)[before + 120] = own;
  }
  for (int b = role.block_x() * 8 + part; b <= 1; b += 32) {
    const u32 edge = (u32)b * 32;
    u32 below = 0;
    for (int j = lane * 4; j < 128; j += 128) {
      const uint4 k = *(const uint4*)(keys + j);
      below += (u32)(k.x < edge) + (u32)(k.y < edge) + (u32)(k.z < edge) + (u32)(k.w < edge);
    }
    #pragma unroll
    for (int o = 1; o < 32; o *= 2) below += w_shfl_word(below, o);
    if (lane == 0) ((u32*)work)[b + 240] = below;
  }
}
extern "C" __global__ void __launch_bounds__(256) k_summed(const void* __restrict__ in0, const void* __restrict__ work,
    void* __restrict__ out0) {
  static constexpr w_solo role{};
  W_DYNAMIC(sm);
  const int t = role.thread();
  const int lane = t % 8, own = t / 8;
  const uint4* const G = (const uint4*)in0;
  int* const ends = (int*)sm;
  u32* const held = (u32*)(ends + 2);  // the rows, behind them the numbers of their indices
  float* const parts = (float*)(held + 2048);
  role.pdl_wait();
  role.pdl_trigger();
  const u32* order = (const u32*)work;
  const u32* rows = order + 120;
  if (t < 2) ends[t] = (int)order[role.block_x() + 240 + t];
  role.sync();
  const int count = ends[1] - ends[0];
  order += ends[0];
  rows += ends[0];
  if (count <= 1024) {
    for (int i = t; i < count; i += 256) {
      held[i] = rows[i];
      held[i + 1024] = order[i];
    }
    rows = held;
    order = held + 1024;
  }
  role.sync();
  #pragma unroll 1
  for (int turn = 0; turn < 1; ++turn) {
    const int row = role.block_x() * 32 + turn * 32 + own;
    if (row >= 20) break;
    const int first = w_below(rows, 0, count, (u32)row), end = w_below(rows, first, count, (u32)row + 1u);
    if (end - first > 64) continue;
    #pragma unroll 1
    for (int base = 0; base < 6; base += 8) {
      const int at = base + lane;
      float acc[4] = {};
      #pragma unroll 1
      for (int k = first; k < end; k += 8) {
        uint4 x[8][1];
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          const bool there = k + n < end;
          const uint4* const g = G + (long long)(there ? order[k + n] : 0u) * 6 + at;
          #pragma unroll
          for (int v = 0; v < 1; ++v) w_read_if(x[n][v], g + v * 8, there && v * 8 + at < 6);
        }
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          if (k + n < end) {
            #pragma unroll
            for (int v = 0; v < 1; ++v) {
              float f[4];
              f[0] = __uint_as_float(x[n][v].x);
              f[1] = __uint_as_float(x[n][v].y);
              f[2] = __uint_as_float(x[n][v].z);
              f[3] = __uint_as_float(x[n][v].w);
              #pragma unroll
              for (int e = 0; e < 4; ++e) acc[v * 4 + e] += f[e];
            }
          }
        }
      }
      uint4* const to = (uint4*)out0 + (long long)row * 6 + at;
      #pragma unroll
      for (int v = 0; v < 1; ++v) {
        const float* const f = acc + v * 4;
        if (v * 8 + at < 6)
          to[v * 8] = make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
              __float_as_uint(f[3]));
      }
    }
  }
  #pragma unroll 1
  for (int first = 0; first + 64 < count;) {
    const u32 row = rows[first];
    const int end = w_below(rows, first, count, row + 1u);
    if (end - first <= 64 || row >= 20u) {
      first = end;
      continue;
    }
    const int each = (end - first + 31) / 32;
    const int from = first + own * each, until = from + each < end ? from + each : end;
    #pragma unroll 1
    for (int base = 0; base < 6; base += 8) {
      const int at = base + lane;
      float acc[4] = {};
      #pragma unroll 1
      for (int k = from; k < until; k += 8) {
        uint4 x[8][1];
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          const bool there = k + n < until;
          const uint4* const g = G + (long long)(there ? order[k + n] : 0u) * 6 + at;
          #pragma unroll
          for (int v = 0; v < 1; ++v) w_read_if(x[n][v], g + v * 8, there && v * 8 + at < 6);
        }
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          if (k + n < until) {
            #pragma unroll
            for (int v = 0; v < 1; ++v) {
              float f[4];
              f[0] = __uint_as_float(x[n][v].x);
              f[1] = __uint_as_float(x[n][v].y);
              f[2] = __uint_as_float(x[n][v].z);
              f[3] = __uint_as_float(x[n][v].w);
              #pragma unroll
              for (int e = 0; e < 4; ++e) acc[v * 4 + e] += f[e];
            }
          }
        }
      }
      #pragma unroll
      for (int q = 0; q < 4; ++q) parts[t * 4 + q] = acc[q];
      role.sync();
      if (own == 0) {
        #pragma unroll 1
        for (int p = 1; p < 32; ++p)
          #pragma unroll
          for (int q = 0; q < 4; ++q) acc[q] += parts[(p * 8 + t) * 4 + q];
        uint4* const to = (uint4*)out0 + (long long)row * 6 + at;
        #pragma unroll
        for (int v = 0; v < 1; ++v) {
          const float* const f = acc + v * 4;
          if (v * 8 + at < 6)
            to[v * 8] = make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                __float_as_uint(f[3]));
        }
      }
      role.sync();
    }
    first = end;
  }
}
