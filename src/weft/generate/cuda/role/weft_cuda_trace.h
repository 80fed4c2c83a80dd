// When roles of a fused kernel ran, and on which multiprocessor: spans behind the work counter (kernels/sm_timeline.py).
// Stands behind weft_cuda_fused.h in the form of a fused kernel that records; no other kernel has it.
struct w_span {
  unsigned sm, cta, role, stage, block, unused;
  unsigned long long begin, end, ns;  // clocks of this multiprocessor, and the GPU's time at the end
};
struct w_trace { unsigned count, unused[3]; };  // spans that ended, recorded or not; they follow
template <unsigned MOST> W_FN void w_span_ended(w_work* work, unsigned role, unsigned stage, unsigned block, unsigned long long begin) {
  const unsigned long long end = w_now(), ns = w_timer();
  w_trace* const trace = (w_trace*)(work + 1);
  const unsigned at = w_report(&trace->count, 1u);
  if (at >= MOST) return;
  w_span* const s = (w_span*)(trace + 1) + at;
  s->sm = w_sm(), s->cta = blockIdx.x, s->role = role, s->stage = stage, s->block = block, s->unused = 0u;
  s->begin = begin, s->end = end, s->ns = ns;
}
