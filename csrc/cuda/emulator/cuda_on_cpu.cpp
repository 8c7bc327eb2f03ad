#include "emulator/cuda_on_cpu.h"

#include <algorithm>
#include <bit>
#include <csetjmp>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ucontext.h>

namespace accel::cuda::emulator {

Position position;

namespace {

constexpr int kWarp = 32;
constexpr int kBarriers = 16;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSharedBytes = 48 << 10;  // what a block may have without asking for more

enum class State { ready, at_barrier, at_exchange, done };

// One thread of the block. It is entered once through ucontext, which asks the kernel of the operating
// system at every switch; from then on by setjmp and longjmp, which do not.
struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t entry;
  std::jmp_buf here;
  bool entered = false;
  State state = State::done;
  int barrier;  // at which it waits
};

struct Warp {
  uint32_t posted[2][kWarp];
  int turn = 0;
  int arrived = 0;
};

std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Warp> warps;
std::jmp_buf scheduler;
ucontext_t scheduler_entry;
const std::function<void()>* body;
unsigned num_threads, arrived_at_barrier[kBarriers];
alignas(64) char shared[4 * kSharedBytes];  // a kernel that takes too much is told at its end
size_t shared_used;
size_t misaligned;  // bytes that were read or written at once, or 0
const char* failed_assertion;
unsigned num_launches;
std::map<const void*, size_t> shared_at;

Fiber& current() { return *fibers[position.thread.x]; }

void to_scheduler() {
  if (!_setjmp(current().here)) _longjmp(scheduler, 1);
}

// The life of a fiber: the same thread of block after block.
void live() {
  for (;;) {
    (*body)();
    current().state = State::done;
    to_scheduler();
  }
}

void resume(unsigned thread) {
  Fiber& fiber = *fibers[thread];
  position.thread = dim3(thread);
  if (_setjmp(scheduler)) return;
  if (fiber.entered) _longjmp(fiber.here, 1);
  fiber.entered = true;
  getcontext(&fiber.entry);
  fiber.entry.uc_stack.ss_sp = fiber.stack.get();
  fiber.entry.uc_stack.ss_size = kStackBytes;
  fiber.entry.uc_link = nullptr;
  makecontext(&fiber.entry, live, 0);
  setcontext(&fiber.entry);
}

[[noreturn]] void fail(const std::string& what) {
  for (auto& fiber : fibers) fiber->entered = false;  // they are somewhere in the midst of a kernel
  throw std::runtime_error("CUDA on CPU: block " + std::to_string(position.block.x) + ": " + what);
}

void check_progress() {
  int waiting[4] = {};
  for (unsigned i = 0; i < num_threads; ++i) ++waiting[static_cast<int>(fibers[i]->state)];
  if (waiting[static_cast<int>(State::ready)]) return;
  const int barrier = waiting[static_cast<int>(State::at_barrier)];
  const int exchange = waiting[static_cast<int>(State::at_exchange)];
  if (barrier || exchange) {
    fail(std::to_string(barrier) + " threads wait at a barrier and " + std::to_string(exchange) +
         " at a shuffle that the other threads never reach");
  }
}

// As far ahead of the other warps as it comes without them.
void run_warp(unsigned warp, bool downwards) {
  for (bool progress = true; progress;) {
    progress = false;
    for (unsigned i = 0; i < kWarp; ++i) {
      const unsigned thread = warp * kWarp + (downwards ? kWarp - 1 - i : i);
      if (fibers[thread]->state != State::ready) continue;
      resume(thread);
      progress = true;
    }
  }
}

void run_block(bool downwards) {
  std::memset(shared, 0xff, sizeof(shared));
  shared_used = 0;
  shared_at.clear();
  std::fill_n(arrived_at_barrier, kBarriers, 0);
  for (auto& warp : warps) warp = Warp();
  for (unsigned i = 0; i < num_threads; ++i) fibers[i]->state = State::ready;
  const unsigned num_warps = num_threads / kWarp;
  for (bool all_done = false; !all_done;) {
    for (unsigned i = 0; i < num_warps; ++i) run_warp(downwards ? num_warps - 1 - i : i, downwards);
    all_done = true;
    for (unsigned i = 0; i < num_threads; ++i) all_done = all_done && fibers[i]->state == State::done;
    if (!all_done) check_progress();
  }
}

}  // namespace

void barrier() { barrier(0, num_threads); }

void barrier(int name, unsigned count) {
  if (++arrived_at_barrier[name] < count) {
    current().state = State::at_barrier;
    current().barrier = name;
    to_scheduler();
    return;
  }
  arrived_at_barrier[name] = 0;
  for (unsigned i = 0; i < num_threads; ++i) {
    Fiber& fiber = *fibers[i];
    if (fiber.state == State::at_barrier && fiber.barrier == name) fiber.state = State::ready;
  }
}

uint32_t exchange(uint32_t word, int from_lane) {
  const unsigned thread = position.thread.x, first = thread / kWarp * kWarp;
  Warp& warp = warps[thread / kWarp];
  const int turn = warp.turn;
  warp.posted[turn][thread % kWarp] = word;
  if (++warp.arrived < kWarp) {
    current().state = State::at_exchange;
    to_scheduler();
  } else {
    warp.arrived = 0;
    warp.turn = 1 - turn;
    for (unsigned i = first; i < first + kWarp; ++i) fibers[i]->state = State::ready;
  }
  return warp.posted[turn][from_lane];
}

void* shared_memory(const void* key, size_t num_bytes) {
  const auto [at, is_new] = shared_at.try_emplace(key, shared_used);
  if (is_new) shared_used += (num_bytes + 63) / 64 * 64;
  return shared + at->second;
}

// Told when the block is over: an exception cannot leave a fiber.
void check_aligned(const void* p, size_t num_bytes) {
  if (reinterpret_cast<uintptr_t>(p) % num_bytes) misaligned = num_bytes;
}

void fail_assertion(const char* condition) { failed_assertion = condition; }

void run(dim3 grid, unsigned block, const std::function<void()>& kernel) {
  if (block == 0 || block > 1024 || block % kWarp) {
    throw std::runtime_error("CUDA on CPU: blocks of " + std::to_string(block) + " threads");
  }
  if (grid.y > 65535) throw std::runtime_error("CUDA on CPU: more than 65535 blocks along y");
  while (fibers.size() < block) fibers.push_back(std::make_unique<Fiber>());
  warps.resize(block / kWarp);
  body = &kernel;
  num_threads = block;
  position.block_size = dim3(block);
  position.grid_size = grid;
  ++num_launches;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      position.block = dim3(x, y);
      run_block((x + y + std::popcount(num_launches)) % 2);
      if (const auto bytes = std::to_string(std::exchange(misaligned, 0)); bytes != "0") {
        fail(bytes + " bytes that do not begin at a multiple of " + bytes);
      }
      if (const char* condition = std::exchange(failed_assertion, nullptr)) {
        fail(std::string("assertion failed: ") + condition);
      }
      if (shared_used > kSharedBytes) fail("more than 48 KiB of shared memory");
    }
  }
}

}  // namespace accel::cuda::emulator
