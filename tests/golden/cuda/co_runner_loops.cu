W_FN void w_best_effort_0(w_work* const w_job, const float* be0_x, float* be0_y, const float* be1_x, float* be1_y, const float* be2_x, float* be2_y) {
W_DYNAMIC(w_memory);
w_drawn* const drawn = (w_drawn*)(w_memory + 272);
const unsigned thread = threadIdx.x - 0u;
w_paced_hand hand;
#pragma unroll 1
for (;;) {
if (thread == 0) *drawn = w_draw_paced<w_stages, false>(w_job, hand);
w_barrier<0, 64>();
const unsigned stage = drawn->stage, block = drawn->block;
if (stage == W_NONE) break;
if (stage == 0u) { w_be0::block(w_be0::frame<0u, 1>(block), w_memory + 0, be0_x, be0_y); }
if (stage == 1u) { w_be1::block(w_be1::frame<0u, 1>(block), w_memory + 0, be1_x, be1_y); }
if (stage == 2u) { w_be2::block(w_be2::frame<0u, 1>(block), w_memory + 0, be2_x, be2_y); w_be2::frame<0u, 1>::leave(); }
w_barrier<0, 64>();
if (thread == 0) w_finish<w_stages>(w_job, hand);
}
}
extern "C" __global__ void __launch_bounds__(64) co_runner(const float* be0_x, float* be0_y, const float* be1_x, float* be1_y, const float* be2_x, float* be2_y, w_work* w_job) {
w_best_effort_0(w_job, be0_x, be0_y, be1_x, be1_y, be2_x, be2_y);
}

W_FN void w_best_effort_0(w_work* const w_job, const unsigned long long w_most, const unsigned long long w_early, const float* be0_x, float* be0_y, const float* be1_x, float* be1_y, const float* be2_x, float* be2_y) {
W_DYNAMIC(w_memory);
w_drawn_chunk* const drawn = (w_drawn_chunk*)(w_memory + 256);
const unsigned thread = threadIdx.x - 0u;
w_chunk_hand& hand = *(w_chunk_hand*)(w_memory + 288);
static_assert(sizeof hand <= 96, "no room for it");
if (thread == 0) hand = w_chunk_hand();
w_chunk_flight flight;
unsigned turn = 0, again = W_AGAIN;
#pragma unroll 1
for (;;) {
if (again == W_AGAIN) { turn ^= 1u; if (thread == 0) drawn[turn] = w_draw_chunk<w_stages, false>(w_job, hand, flight, (unsigned)w_most); w_barrier<0, 64>(); }
if (drawn[turn].stage == W_NONE) break;
unsigned block = drawn[turn].block;
turn ^= 1u;
#pragma unroll 1
for (;;) {
if (thread == 0) w_before(w_job, hand, flight, w_seen(&drawn[turn ^ 1u].last) - block - 1u, (unsigned)w_most, w_early != 0);
const unsigned stage = w_seen(&drawn[turn ^ 1u].stage);
if (stage == 0u) { w_be0::block(w_be0::frame<0u, 1>(block), w_memory + 0, be0_x, be0_y); }
if (stage == 1u) { w_be1::block(w_be1::frame<0u, 1>(block), w_memory + 0, be1_x, be1_y); }
if (stage == 2u) { w_be2::block(w_be2::frame<0u, 1>(block), w_memory + 0, be2_x, be2_y); w_be2::frame<0u, 1>::leave(); }
if (++block == w_seen(&drawn[turn ^ 1u].last)) break;
if (stage == 1u) w_barrier<0, 64>();
}
if (thread == 0) drawn[turn] = w_next_chunk<w_stages>(w_job, hand, flight);
w_barrier<0, 64>();
if (thread == 0) w_finish_chunk<w_stages>(w_job, hand, drawn[turn ^ 1u].last - drawn[turn ^ 1u].block);
again = drawn[turn].stage;
}
}
extern "C" __global__ void __launch_bounds__(64) co_runner(const unsigned long long w_most, const unsigned long long w_early, const float* be0_x, float* be0_y, const float* be1_x, float* be1_y, const float* be2_x, float* be2_y, w_work* w_job) {
w_best_effort_0(w_job, w_most, w_early, be0_x, be0_y, be1_x, be1_y, be2_x, be2_y);
}
