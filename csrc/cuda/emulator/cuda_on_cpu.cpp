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
bool has_bulk_copies = true;

namespace {

constexpr int kWarp = 32;
constexpr int kBarriers = 16, kClusterBarrier = kBarriers;
constexpr unsigned kMaxCluster = 2;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSharedBytes = 48 << 10;  // what a block may have without asking for more
constexpr size_t kLaunchedSharedBytes = 227 << 10;  // with the variables, by asking

enum class State { ready, at_barrier, at_exchange, at_arrivals, done };

// One thread of the block. It is entered once through ucontext, which asks the kernel of the operating
// system at every switch; from then on by setjmp and longjmp, which do not.
struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t entry;
  std::jmp_buf here;
  bool entered = false;
  State state = State::done;
  unsigned block;  // of the cluster
  int barrier;  // at which it waits
  const void* arrivals;  // for which it waits
};

struct Warp {
  uint32_t posted[2][kWarp];
  int turn = 0;
  int arrived = 0;
};

// What the 64 bits of an Arrivals are here.
struct Phase {
  int32_t num_bytes;  // yet to come
  uint8_t is_told, number;
  uint16_t begun;
};
constexpr uint16_t kBegun = 0xb9e7;

struct Copy {
  void* to;
  const void* from;
  uint32_t num_bytes;
  Phase* phase;
};

struct SharedMemory {
  alignas(128) char variables[4 * kSharedBytes];  // a kernel that takes too much is told at its end
  alignas(128) char launched[kLaunchedSharedBytes];
};

// Threads, warps and shared memory of all blocks of the cluster, one block after the other.
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Warp> warps;
SharedMemory shared[kMaxCluster];
unsigned running;  // the fiber
std::jmp_buf scheduler;
ucontext_t scheduler_entry;
const std::function<void()>* body;
unsigned num_threads, block_threads, arrived_at_barrier[kMaxCluster][kBarriers + 1];
std::vector<Copy> copies;  // not made yet
bool copies_at_once;
size_t shared_used, launched_shared_bytes;
std::string failure;  // told when the block is over: an exception cannot leave a fiber
unsigned num_launches;
std::map<const void*, size_t> shared_at;

Fiber& current() { return *fibers[running]; }

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

unsigned num_blocks() { return num_threads / block_threads; }  // of the cluster

void resume(unsigned thread) {
  Fiber& fiber = *fibers[thread];
  running = thread;
  position.thread = dim3(thread % block_threads);
  position.block.x = position.block.x / num_blocks() * num_blocks() + fiber.block;
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
  int waiting[5] = {};
  for (unsigned i = 0; i < num_threads; ++i) ++waiting[static_cast<int>(fibers[i]->state)];
  if (waiting[static_cast<int>(State::ready)]) return;
  const int barrier = waiting[static_cast<int>(State::at_barrier)];
  const int exchange = waiting[static_cast<int>(State::at_exchange)];
  const int arrivals = waiting[static_cast<int>(State::at_arrivals)];
  if (barrier || exchange) {
    fail(std::to_string(barrier) + " threads wait at a barrier and " + std::to_string(exchange) +
         " at a shuffle that the other threads never reach");
  }
  if (arrivals) fail(std::to_string(arrivals) + " threads wait for bytes that never come");
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

void run_cluster(bool downwards) {
  for (unsigned i = 0; i < num_blocks(); ++i) {
    std::memset(shared[i].variables, 0xff, sizeof(shared[i].variables));
    std::memset(shared[i].launched, 0xff, launched_shared_bytes);
  }
  shared_used = 0;
  shared_at.clear();
  copies.clear();
  std::memset(arrived_at_barrier, 0, sizeof(arrived_at_barrier));
  for (auto& warp : warps) warp = Warp();
  for (unsigned i = 0; i < num_threads; ++i) {
    fibers[i]->state = State::ready;
    fibers[i]->block = i / block_threads;
  }
  const unsigned num_warps = num_threads / kWarp;
  for (bool all_done = false; !all_done;) {
    for (unsigned i = 0; i < num_warps; ++i) run_warp(downwards ? num_warps - 1 - i : i, downwards);
    all_done = true;
    for (unsigned i = 0; i < num_threads; ++i) all_done = all_done && fibers[i]->state == State::done;
    if (!all_done) check_progress();
  }
}

// Waits with those that name the same barrier and count their arrivals at the same place.
void barrier_of(unsigned& arrived, int name, unsigned count) {
  if (++arrived < count) {
    current().state = State::at_barrier;
    current().barrier = name;
    to_scheduler();
    return;
  }
  arrived = 0;
  for (unsigned i = 0; i < num_threads; ++i) {
    Fiber& fiber = *fibers[i];
    const bool is_near = name == kClusterBarrier || fiber.block == current().block;
    if (is_near && fiber.state == State::at_barrier && fiber.barrier == name) fiber.state = State::ready;
  }
}

Phase* phase_of(const uint64_t* arrivals) {
  auto* phase = reinterpret_cast<Phase*>(const_cast<uint64_t*>(arrivals));
  if (phase->begun != kBegun) failure = "Arrivals that are used before they begin";
  return phase;
}

void end_phase_if_over(Phase* phase) {
  if (!phase->is_told || phase->num_bytes) return;
  phase->is_told = 0;
  phase->number ^= 1;
  for (unsigned i = 0; i < num_threads; ++i) {
    Fiber& fiber = *fibers[i];
    if (fiber.state == State::at_arrivals && fiber.arrivals == phase) fiber.state = State::ready;
  }
}

void deliver(const Copy& copy) {
  std::memcpy(copy.to, copy.from, copy.num_bytes);
  copy.phase->num_bytes -= static_cast<int32_t>(copy.num_bytes);
  end_phase_if_over(copy.phase);
}

// The same place of another block's shared memory.
template <typename T>
T* in_block(T* p, int block_of_cluster) {
  const auto there = reinterpret_cast<char*>(p) - reinterpret_cast<char*>(&shared[current().block]);
  return reinterpret_cast<T*>(reinterpret_cast<char*>(&shared[block_of_cluster]) + there);
}

}  // namespace

void barrier() { barrier(0, block_threads); }

void barrier(int name, unsigned count) {
  barrier_of(arrived_at_barrier[current().block][name], name, count);
}

void cluster_barrier() { barrier_of(arrived_at_barrier[0][kClusterBarrier], kClusterBarrier, num_threads); }

void begin_arrivals(uint64_t* arrivals) { *reinterpret_cast<Phase*>(arrivals) = {0, 0, 0, kBegun}; }

void expect_bytes(uint64_t* arrivals, uint32_t num_bytes) {
  Phase* phase = phase_of(arrivals);
  if (phase->is_told) failure = "a phase that is told twice what to expect";
  phase->num_bytes += static_cast<int32_t>(num_bytes);
  phase->is_told = 1;
  end_phase_if_over(phase);
}

void wait_for_bytes(const uint64_t* arrivals, int number) {
  Phase* phase = phase_of(arrivals);
  for (size_t i = 0; i < copies.size();) {
    if (copies[i].phase != phase) {
      ++i;
      continue;
    }
    const Copy copy = copies[i];
    copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(i));
    deliver(copy);
  }
  while (phase->number == number) {
    current().state = State::at_arrivals;
    current().arrivals = phase;
    to_scheduler();
  }
}

void bulk_copy(void* to_shared, const void* from, uint32_t num_bytes, uint64_t* arrivals) {
  check_aligned(to_shared, 16);
  check_aligned(from, 16);
  if (num_bytes % 16) failure = "a bulk copy of " + std::to_string(num_bytes) + " bytes";
  const Copy copy{to_shared, from, num_bytes, phase_of(arrivals)};
  copies_at_once ? deliver(copy) : copies.push_back(copy);
}

void send(float value, float* slot, uint64_t* arrivals, int block_of_cluster) {
  const Copy copy{in_block(slot, block_of_cluster), &value, sizeof(value),
                  phase_of(in_block(arrivals, block_of_cluster))};
  deliver(copy);
}

unsigned char* launched_shared() {
  return reinterpret_cast<unsigned char*>(shared[current().block].launched);
}

uint32_t exchange(uint32_t word, int from_lane) {
  const unsigned thread = running, first = thread / kWarp * kWarp;
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
  return shared[current().block].variables + at->second;
}

void check_aligned(const void* p, size_t num_bytes) {
  if (reinterpret_cast<uintptr_t>(p) % num_bytes) {
    const std::string bytes = std::to_string(num_bytes);
    failure = bytes + " bytes that do not begin at a multiple of " + bytes;
  }
}

void fail_assertion(const char* condition) { failure = std::string("assertion failed: ") + condition; }

void run(dim3 grid, unsigned block, const std::function<void()>& kernel, unsigned shared_bytes,
         unsigned blocks_per_cluster) {
  if (block == 0 || block > 1024 || block % kWarp) {
    throw std::runtime_error("CUDA on CPU: blocks of " + std::to_string(block) + " threads");
  }
  if (grid.y > 65535) throw std::runtime_error("CUDA on CPU: more than 65535 blocks along y");
  if (blocks_per_cluster > kMaxCluster || grid.x % blocks_per_cluster) {
    throw std::runtime_error("CUDA on CPU: clusters of " + std::to_string(blocks_per_cluster) + " blocks");
  }
  body = &kernel;
  block_threads = block;
  num_threads = block * blocks_per_cluster;
  launched_shared_bytes = std::min<size_t>(shared_bytes, kLaunchedSharedBytes);
  while (fibers.size() < num_threads) fibers.push_back(std::make_unique<Fiber>());
  warps.resize(num_threads / kWarp);
  position.block_size = dim3(block);
  position.grid_size = grid;
  ++num_launches;
  failure.clear();  // of a launch that ended otherwise
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; x += blocks_per_cluster) {
      position.block = dim3(x, y);
      const unsigned turn = x / blocks_per_cluster + y;
      copies_at_once = (turn / 2 + std::popcount(num_launches)) % 2;
      run_cluster((turn + std::popcount(num_launches)) % 2);
      if (!copies.empty()) failure = "bulk copies that no thread waited for";
      if (!failure.empty()) fail(std::exchange(failure, ""));
      const size_t launched = shared_bytes ? shared_used + shared_bytes : 0;
      if (shared_used > kSharedBytes) fail("more than 48 KiB of shared memory");
      if (launched > kLaunchedSharedBytes) fail("more than 227 KiB of shared memory");
    }
  }
}

}  // namespace accel::cuda::emulator
