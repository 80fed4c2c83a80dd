// A best-effort role as a kernel of its own, under a throttle. Stands behind weft_cuda_fused.h; no other kernel has it.
// What the thread that draws knows of its own time.
struct w_paced_hand : w_hand {
  unsigned long long began = 0;
  bool worked = false;
};
// Whether all that the limit allows is drawn.
W_FN bool w_used_up(w_work* work) {
  const unsigned long long word = w_peek(&work->granted);
  return (int)((unsigned)word - (unsigned)(word >> 32)) <= 0 && (int)(w_peek(&work->limit) - (unsigned)word) <= 0;
}
// Whether a CTA may begin a block now: of each period of the GPU's time the first `duty` 256ths, in which all CTAs work;
// without one, each CTA has its own: it rests behind a block until that was `duty` 256ths of the time since it began.
W_FN bool w_rested(unsigned duty, unsigned period, unsigned long long spent, unsigned long long since) {
  if (duty >= 256u) return true;
  if (period == 0) return duty != 0 && since * duty >= spent * (256u - duty);
  return w_timer() % period * 256u < (unsigned long long)period * duty;
}
// Draws as w_draw does, under the throttle, and only if the CTA's multiprocessor and its own number are among those that
// may. It looks at the throttle and at `stop` between two naps.
template <class JOB, bool STAYS> W_FN w_drawn w_draw_paced(w_work* work, w_paced_hand& h) {
  const unsigned long long ended = w_now(), spent = h.worked ? ended - h.began : 0;
  for (;;) {
    const unsigned stop = w_peek(&work->stop), duty = w_peek(&work->duty), sms = w_peek(&work->sms);
    const unsigned ctas = w_peek(&work->ctas);
    const bool may = (sms == 0 || w_sm() < sms) && (ctas == 0 || blockIdx.x < ctas);
    if (stop == 0 && may && w_rested(duty, w_peek(&work->period), spent, w_now() - ended)) break;
    w_count_ended<JOB>(work, h);
    if (stop != 0 || (!STAYS && w_used_up(work))) return {W_NONE, 0u};
    w_pause(512);
  }
  const w_drawn d = w_draw<JOB, 0u, STAYS>(work, h, nullptr);
  h.worked = d.stage != W_NONE;
  h.began = w_now();
  return d;
}
