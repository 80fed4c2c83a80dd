// Prices of European calls and puts by the formula of Black and Scholes:
//   call = S N(d1) - X exp(-r T) N(d2), put = X exp(-r T) N(-d2) - S N(-d1),
//   d1 = (log(S / X) + (r + v^2 / 2) T) / (v sqrt(T)), d2 = d1 - v sqrt(T)
extern "C" __global__ void __launch_bounds__(256)
black_scholes(const float* __restrict__ price, const float* __restrict__ strike, const float* __restrict__ years,
              float* __restrict__ call, float* __restrict__ put, int options, float rate, float volatility) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= options) return;
  const float s = price[i], x = strike[i], t = years[i];
  const float spread = volatility * sqrtf(t);
  const float d1 = (logf(s / x) + (rate + 0.5f * volatility * volatility) * t) / spread, d2 = d1 - spread;
  const float discounted = x * expf(-rate * t), n1 = normcdff(d1), n2 = normcdff(d2);
  call[i] = s * n1 - discounted * n2;
  put[i] = discounted * (1.0f - n2) - s * (1.0f - n1);
}
