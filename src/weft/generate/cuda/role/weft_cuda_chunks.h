// Chunks: one addition draws several blocks that follow each other. Stands behind weft_cuda_persistent.h; kernels that draw
// their blocks one by one do not have it.
// What a CTA has drawn: blocks of a stage from `block` up to `last`, which is none of them.
struct alignas(16) w_drawn_chunk { unsigned stage, block, last; };
// What the thread that draws knows. It lies in shared memory: in registers it would be there of every thread of the CTA,
// while blocks run.
struct w_chunk_hand : w_paced_hand {
  unsigned asked = 0;   // blocks; 0: no addition is under way
  unsigned left = 0;    // blocks that are granted and not drawn, as far as is known
  bool looked = false;  // whether what is under way is the throttle
};
// What is under way while a block runs: `stop` and `duty`, `sms` and `ctas`, which stand next to each other; or an addition.
struct w_chunk_flight {
  unsigned long long first = 0, second = 0;
};
W_FN void w_look(w_work* work, w_chunk_hand& h, w_chunk_flight& f) {
  f.first = w_peek((const unsigned long long*)&work->stop);
  f.second = w_peek((const unsigned long long*)&work->sms);
  h.looked = true;
}
// Whether nothing holds the CTA back, as far as was looked.
W_FN bool w_goes(const w_chunk_hand& h, const w_chunk_flight& f) {
  return h.looked && (unsigned)f.first == 0 && (unsigned)(f.first >> 32) >= 256u && f.second == 0;
}
// Asks for `most` blocks; towards the end of a grant for half of this CTA's share of what is left, lest all wait for one.
W_FN void w_ask(w_work* work, w_chunk_hand& h, w_chunk_flight& f, unsigned most) {
  const unsigned two = 2u * gridDim.x;
  h.asked = h.left >= most * two ? most : h.left < 2u * two ? 1u : h.left / two;
  f.first = w_take(&work->granted, (unsigned long long)h.asked << 32);
  h.looked = false;
}
// What was asked for, as far as it is below `end`. The rest was drawn in vain, and is forgotten as other such draws are.
template <class JOB> W_FN w_drawn_chunk w_got(w_work* work, w_chunk_hand& h, const w_chunk_flight& f) {
  const unsigned end = (unsigned)f.first, ticket = (unsigned)(f.first >> 32), asked = h.asked, all = asked * gridDim.x;
  h.asked = 0;
  h.drew = (int)(end - ticket) > 0;
  if (!h.drew) return {W_AGAIN, 0u, 0u};
  const unsigned there = end - ticket;
  h.left = there > all ? there - all : 0u;  // until this CTA draws again the others draw as much
  const w_drawn d = w_taken<JOB>(work, h, end, ticket);
  h.worked = true, h.began = w_now();
  return {d.stage, d.block, d.block + (asked < there ? asked : there)};
}
// In front of each block of a chunk behind which `behind` follow. The throttle is read while the last one runs. AHEAD: it is
// while the one before it runs, and before the last one the next chunk is asked for, where nothing holds the CTA back. Of
// a chunk of one block that was not known.
W_FN void w_before(w_work* work, w_chunk_hand& h, w_chunk_flight& f, unsigned behind, unsigned most, bool ahead) {
  if (behind > (ahead ? 1u : 0u)) return;
  if (ahead && behind == 0u && w_goes(h, f)) w_ask(work, h, f, most);
  else w_look(work, h, f);
}
// The chunk that was asked for ahead; W_AGAIN: there is none, and `w_draw_chunk` says why.
template <class JOB> W_FN w_drawn_chunk w_next_chunk(w_work* work, w_chunk_hand& h, const w_chunk_flight& f) {
  if (h.asked == 0) return {W_AGAIN, 0u, 0u};
  return w_got<JOB>(work, h, f);
}
// Blocks that all threads of the CTA have ended, by one of them.
template <class JOB> W_FN void w_finish_chunk(w_work* work, w_chunk_hand& h, unsigned blocks) {
  h.uncounted += blocks;
  if (h.uncounted >= W_COUNTED_TOGETHER) w_count_ended<JOB>(work, h);
}
// The next chunk, or W_NONE, as `w_draw_paced` has it for one block. Where nothing held the CTA back while its last block
// ran it is one addition; else the throttle is looked at anew. A CTA that something holds back draws single blocks.
template <class JOB, bool STAYS> W_FN w_drawn_chunk w_draw_chunk(w_work* work, w_chunk_hand& h, w_chunk_flight& f, unsigned most) {
  const w_drawn_chunk none = {W_NONE, 0u, 0u};
  if (JOB::total() == 0) return none;
  if (h.drew && w_goes(h, f)) {
    w_ask(work, h, f, most);
    const w_drawn_chunk found = w_got<JOB>(work, h, f);
    if (h.drew) return found;
  }
  const unsigned long long ended = w_now(), spent = h.worked ? ended - h.began : 0;
  for (;;) {
    w_look(work, h, f);
    unsigned long long word = w_peek(&work->granted);
    const bool goes = w_goes(h, f);
    if ((unsigned)f.first != 0) break;
    if (!goes) {
      const unsigned sms = (unsigned)f.second, ctas = (unsigned)(f.second >> 32), duty = (unsigned)(f.first >> 32);
      const bool may = (sms == 0 || w_sm() < sms) && (ctas == 0 || blockIdx.x < ctas);
      if (!may || !w_rested(duty, w_peek(&work->period), spent, w_now() - ended)) {
        w_count_ended<JOB>(work, h);
        if (!STAYS && w_used_up(work)) break;
        w_pause(512);
        continue;
      }
    }
    if ((int)((unsigned)word - (unsigned)(word >> 32)) > 0) {
      h.left = (unsigned)word - (unsigned)(word >> 32);
      w_ask(work, h, f, goes ? most : 1u);
      word = f.first;
      const w_drawn_chunk found = w_got<JOB>(work, h, f);
      if (h.drew) return found;
    }
    // in vain: as in `w_draw`
    w_count_ended<JOB>(work, h);
    const unsigned end = (unsigned)word, limit = w_peek(&work->limit), open = w_peek(&work->open);
    const unsigned goal = (int)(limit - open) < 0 ? limit : open;
    if ((int)(goal - end) > 0) {
      word = w_peek(&work->granted);
      if ((unsigned)word == end && (int)(end - (unsigned)(word >> 32)) <= 0) {
        w_settled();
        w_exchange(&work->granted, word, (unsigned long long)end << 32 | goal);
      }
    } else if (STAYS || (int)(limit - end) > 0) {
      w_pause(256);
    } else {
      break;
    }
  }
  w_count_ended<JOB>(work, h);
  return none;
}
