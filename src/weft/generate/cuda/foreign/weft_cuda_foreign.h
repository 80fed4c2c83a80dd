// Between a kernel that others wrote and the role that runs it: places of threads, and barriers that some threads may
// never reach. What the role's frame gives besides (weft_cuda_fused.h) is found where it is used. Includes nothing.
//
// FORM of the barriers: 0: every thread meets at every one. 1: threads may leave before, and meet those that are left
// with `false` until all have left. 2: as 1 where values are also counted: each barrier is two, that of the values and
// that of how many threads are left.
template <unsigned X, unsigned Y, unsigned Z> W_FN uint3 w_foreign_thread(unsigned t) {
  uint3 i;
  i.x = Y * Z == 1u ? t : t % X;
  i.y = Y == 1u ? 0u : Z == 1u ? t / X : t / X % Y;
  i.z = Z == 1u ? 0u : t / (X * Y);
  return i;
}
template <class Role> W_FN uint3 w_foreign_block(const Role& role) {
  uint3 i;
  i.x = role.block_x(), i.y = role.block_y(), i.z = role.block_z();
  return i;
}
template <class Role> W_FN dim3 w_foreign_grid(const Role& role) {
  dim3 i;
  i.x = role.blocks_x(), i.y = w_blocks_y(role), i.z = w_blocks_z(role);
  return i;
}
template <unsigned X, unsigned Y, unsigned Z> W_FN dim3 w_foreign_dim() {
  dim3 i;
  i.x = X, i.y = Y, i.z = Z;
  return i;
}
template <int FORM, class Role> W_FN void w_foreign_sync(const Role& role) {
  if constexpr (FORM == 0) {
    role.sync();
  } else if constexpr (FORM == 1) {
    w_any(role, true);
  } else {
    w_count(role, false);
    w_count(role, true);
  }
}
template <int FORM, class Role> W_FN int w_foreign_count(const Role& role, bool x) {
  const int n = w_count(role, x);
  if constexpr (FORM == 2) w_count(role, true);
  return n;
}
template <int FORM, class Role> W_FN int w_foreign_or(const Role& role, bool x) {
  if constexpr (FORM == 0) return w_any(role, x);
  const bool any = w_count(role, x) > 0;
  w_count(role, true);
  return any;
}
template <int FORM, class Role> W_FN int w_foreign_and(const Role& role, bool x) {
  if constexpr (FORM == 0) return !w_any(role, !x);
  const int n = w_count(role, x);
  return n == w_count(role, true);
}
// Threads that have left wait here for the others.
template <int FORM, class Role> W_FN void w_foreign_leave(const Role& role) {
  if constexpr (FORM == 1) {
    while (w_any(role, false)) {}
  } else if constexpr (FORM == 2) {
    do w_count(role, false);
    while (w_count(role, false) > 0);
  }
}
// An argument that is passed by value, from the words that it was passed as.
template <class T, class... Words> W_FN T w_foreign_scalar(Words... given) {
  static_assert(sizeof(T) <= sizeof...(Words) * 8, "all of its words");
  const unsigned long long words[] = {given...};
  T x;
  memcpy(&x, words, sizeof x);
  return x;
}
