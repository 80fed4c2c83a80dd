"""The work counter by itself: threads of the operating system draw its blocks, while another raises the limit.

They draw single blocks, as roles of fused kernels do, or some of them chunks of blocks, as co-runners do.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.slow import few

from weft.generate.cuda.role.fused import fused_header, persistent_header

PROGRAM = r"""
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#define W_FN inline
static thread_local unsigned long long chance = 1;
static void maybe() {
  chance = chance * 6364136223846793005ull + 1442695040888963407ull;
  if ((chance >> 33) % 3 == 0) std::this_thread::yield();
}
template <class T> T w_peek(const T* p) { maybe(); return __atomic_load_n(p, __ATOMIC_RELAXED); }
static void w_poke(unsigned* p, unsigned x) { maybe(); __atomic_store_n(p, x, __ATOMIC_RELAXED); }
static void w_publish(unsigned* p, unsigned x) { maybe(); __atomic_store_n(p, x, __ATOMIC_RELEASE); }
static unsigned long long w_take(unsigned long long* p, unsigned long long n) {
  maybe();
  return __atomic_fetch_add(p, n, __ATOMIC_RELAXED);
}
static unsigned w_report(unsigned* p, unsigned n) { maybe(); return __atomic_fetch_add(p, n, __ATOMIC_RELEASE); }
static bool w_exchange(unsigned long long* p, unsigned long long from, unsigned long long to) {
  maybe();
  return __atomic_compare_exchange_n(p, &from, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
static void w_settled() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
static unsigned long long w_now() { return 0; }
static struct { unsigned x; } blockIdx;
static const struct { unsigned x; } gridDim = {1};  // as if others drew little, so that chunks are whole
static unsigned long long w_timer() { return 0; }
static unsigned w_sm() { return 0; }
static unsigned w_seen(const unsigned* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static void w_pause(unsigned) { std::this_thread::yield(); }
HEADER
static constexpr unsigned SIZES[] = {STAGES};
struct Job {
  static constexpr unsigned stages = sizeof SIZES / sizeof *SIZES;
  static constexpr bool total() { return true; }
  static constexpr unsigned blocks(unsigned s) { return SIZES[s]; }
};
static void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}
int main() {
  const unsigned passes = PASSES, first = FIRST, begin = BEGIN;
  unsigned all = 0;
  for (unsigned n : SIZES) all += n;
  const unsigned total = all * passes;
  alignas(16) w_work work{};
  work.granted = (unsigned long long)begin << 32 | begin;
  work.duty = 256;
  work.limit = begin, work.open = begin + SIZES[first], work.stage = first, work.finished = begin;
  std::vector<std::vector<unsigned>> ran;  // plain memory: how often each block of a stage has run
  for (unsigned n : SIZES) ran.emplace_back(n, 0u);
  std::atomic<unsigned> launches{0};
  std::atomic<bool> over{false};
  std::atomic<unsigned> several{0}, short_ones{0};
  std::thread feeder([&] {
    chance = 99;
    while (!over) {
      const unsigned now = work.limit - begin;
      if (now < total) {
        const unsigned step = 1 + (unsigned)(chance >> 33) % (7 * CHUNK);
        __atomic_store_n(&work.limit, begin + (now + step < total ? now + step : total), __ATOMIC_RELAXED);
      }
      if (CHUNK > 1) __atomic_store_n(&work.stop, (unsigned)(chance >> 33) % 5 == 0, __ATOMIC_RELAXED);
      maybe();
      std::this_thread::yield();
    }
  });
  while (__atomic_load_n(&work.finished, __ATOMIC_RELAXED) - begin != total) {
    std::vector<std::thread> roles;
    for (unsigned r = 0; r < 5; ++r)
      roles.emplace_back([&, r] {
        chance = 1000 * launches++ + r;
        const auto run = [&](const w_drawn d) {
          if (d.stage >= Job::stages || d.block >= SIZES[d.stage]) fail("a block that is not there");
          unsigned before = d.stage;
          do before = before ? before - 1 : Job::stages - 1; while (SIZES[before] == 0);
          const unsigned mine = ran[d.stage][d.block];
          if (before != d.stage)  // all blocks of the stage before have run as often, or once more behind the first
            for (unsigned x : ran[before])
              if (x != mine + (d.stage == first ? 0 : 1)) fail("a stage that begins before the one before it ends");
          maybe();
          if (ran[d.stage][d.block] != mine) fail("a block that runs twice");
          ran[d.stage][d.block] = mine + 1;
        };
        const unsigned most = r % 3 == 0 ? CHUNK : r % 3 == 1 ? 1 : 2;
        const bool ahead = most > 1 && chance % 2;
        if (CHUNK > 1 && r < 4) {
          w_chunk_hand h;
          w_chunk_flight f;
          w_drawn_chunk d = {W_AGAIN, 0, 0};
          for (;;) {
            if (d.stage == W_AGAIN) d = w_draw_chunk<Job, false>(&work, h, f, most);
            if (d.stage == W_NONE) break;
            if (d.block >= d.last || d.last - d.block > most) fail("a chunk of another size");
            const unsigned blocks = d.last - d.block;
            if (blocks > 1) ++several;
            if (blocks < most) ++short_ones;
            for (unsigned b = d.block; b != d.last; ++b) {
              w_before(&work, h, f, d.last - b - 1, most, ahead);
              run({d.stage, b});
            }
            const w_drawn_chunk next = w_next_chunk<Job>(&work, h, f);
            w_finish_chunk<Job>(&work, h, d.last - d.block);
            d = next;
          }
          return;
        }
        w_hand hand;
        unsigned ended = 0, left = (unsigned)(chance >> 2) % 23;
        for (;;) {
          if (left-- == 0) ended = 1;  // its LC role has ended
          const w_drawn d = w_draw<Job, 1u, false>(&work, hand, &ended);
          if (d.stage == W_NONE) break;
          run(d);
          w_finish<Job>(&work, hand);
        }
      });
    for (auto& t : roles) t.join();
  }
  over = true;
  feeder.join();
  for (auto& s : ran)
    for (unsigned x : s)
      if (x != passes) fail("a block that is lost");
  if ((unsigned)work.granted != begin + total || work.finished != begin + total) fail("a wrong count");
  std::printf("%u %d\n", total, several != 0 && short_ones != 0);
}
"""


def program(stages: tuple[int, ...], passes: int, begin: int = 0, chunk: int = 1) -> str:
    header = fused_header()
    counter = header[header.index("// ---- which block next") :] + persistent_header(chunks=True)
    first = next(i for i, n in enumerate(stages) if n)
    text = PROGRAM.replace("HEADER", counter).replace("STAGES", ", ".join(str(n) for n in stages))
    for name, value in (("PASSES", passes), ("FIRST", first), ("BEGIN", f"{begin}u"), ("CHUNK", f"{chunk}u")):
        text = text.replace(name, str(value))
    return text


@pytest.mark.parametrize(
    ("stages", "passes", "begin", "chunk"),
    few(
        [
            ((131,), 20, 0, 1),
            ((1,), 500, 0, 1),
            ((9, 5, 1), 150, 0, 1),
            ((131,), 20, 0, 8),
            ((0, 7, 0, 3), 150, 0, 1),
            ((20011,), 1, 0, 1),
            ((132, 133), 4, 2**32 - 300, 1),
            ((9, 5, 1), 150, 0, 4),
            ((0, 7, 0, 3), 150, 0, 16),
            ((20011,), 1, 0, 16),
            ((132, 133), 4, 2**32 - 300, 5),
        ],
        3,
        unpack=True,
    ),
    ids=str,
)
def test_every_block_is_drawn_once(
    stages: tuple[int, ...], passes: int, begin: int, chunk: int, tmp_path: Path
) -> None:
    """`begin`: numbers of blocks go on behind 2^32. `chunk`: that some draw at once, while others draw single ones."""
    (tmp_path / "w.cpp").write_text(program(stages, passes, begin, chunk), encoding="utf-8")
    command = ["g++", "-std=c++17", "-O2", "-pthread", "w.cpp", "-o", "w"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[:3000]
    both = 0
    for run in range(20):
        done = subprocess.run(["./w"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout
        drawn, mixed = done.stdout.split()
        assert int(drawn) == sum(stages) * passes
        both += int(mixed)
        if run >= 2 and (both or chunk == 1):
            break
    assert both > 0 or chunk == 1, "whole chunks and short ones; on a busy machine one role may have drawn all"


def test_a_draw_that_is_not_atomic_is_seen(tmp_path: Path) -> None:
    text = program((20011,), 1).replace(
        "  return __atomic_fetch_add(p, n, __ATOMIC_RELAXED);",
        "  volatile unsigned long long* const q = p;\n  const unsigned long long x = *q;\n  maybe();\n  *q = x + n;\n"
        "  return x;",
    )
    (tmp_path / "w.cpp").write_text(text, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O2", "-pthread", "w.cpp", "-o", "w"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    for _ in range(5):
        try:
            done = subprocess.run(["./w"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=10)
        except subprocess.TimeoutExpired:
            return
        if done.returncode:
            assert "twice" in done.stdout or "lost" in done.stdout or "count" in done.stdout
            return
    raise AssertionError("blocks that are drawn twice are not seen")
