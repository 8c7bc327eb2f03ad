// Kernels with the faults that the emulator is there to find, and one without; called by test_emulator.py.
#include <stdexcept>
#include <string>

#include "accel/cuda/bulk_copy.h"

namespace accel::cuda {
namespace {

struct Sums {
  float of_thread[64];
};

struct Call {
  float* out;
  int fault;
};

enum Fault {
  kNone,
  kBarrierMissing,
  kBarrierNotReached,
  kShuffleNotReached,
  kSharedNotWritten,
  kMisaligned,
  kAssertionFails,
  // of copied()
  kNoFault,
  kNoWait,
  kRefilledEarly,
  kBytesMissing,
  kNeverBegun,
  kLeftEarly
};

// out[t] = t + the number of the thread across the block.
__global__ void faulty(const Call call) {
  const int thread = threadIdx.x;
  float* sums = block_shared<Sums>().of_thread;
  if (call.fault != kSharedNotWritten) sums[thread] = static_cast<float>(thread);
  if (call.fault == kBarrierNotReached && thread == 5) return;
  if (call.fault != kBarrierMissing) __syncthreads();
  if (call.fault == kShuffleNotReached && thread == 40) return;
  if (call.fault == kMisaligned) load<true>(call.out + 1, 4);
  const bool thread_is_not_the_last = call.fault != kAssertionFails || thread < 63;
  ACCEL_DEVICE_ASSERT(thread_is_not_the_last);
  const float zero = row_sum(0.0f, RowTeams{5}, 0);
  call.out[blockIdx.x * blockDim.x + thread] = sums[thread] + sums[blockDim.x - 1 - thread] + zero;
}

struct Copied {
  Arrivals arrivals, sent;
  float from_other;
};

// Two blocks of a cluster: out[b, t] = 64 b + t + what the other one sent, 64 (1 - b). Twice through the same
// place, as a ring would.
__global__ void copied(const Call call) {
  const int thread = threadIdx.x, block = blockIdx.x;
  auto& shared = block_shared<Copied>();
  float* place = reinterpret_cast<float*>(launched_shared());
  if (thread == 0 && call.fault != kNeverBegun) shared.arrivals.begin(), shared.sent.begin();
  cluster_barrier();
  const auto fetch = [&](int turn) {
    if (thread) return;
    shared.arrivals.expect(call.fault == kBytesMissing ? 272 : 256);
    shared.arrivals.copy(place, call.out + (turn * 2 + block) * 64, 256);
  };
  fetch(0);
  if (call.fault == kRefilledEarly) {
    shared.arrivals.wait(0);
    fetch(1);  // what other threads have not read yet
  }
  if (call.fault != kNoWait) shared.arrivals.wait(0);
  const float first = place[thread];
  __syncthreads();
  if (call.fault != kRefilledEarly) fetch(1);
  shared.arrivals.wait(1);
  if (thread == 0) {
    shared.sent.expect(sizeof(float));
    shared.sent.send(64.0f * block, &shared.from_other, 1 - block);
  }
  shared.sent.wait(0);
  __syncthreads();
  call.out[block * 64 + thread] = first + place[thread] + shared.from_other;
  if (call.fault != kLeftEarly || block) cluster_barrier();
}

}  // namespace
}  // namespace accel::cuda

extern "C" const char* run_copied(float* out, int fault) {
  static thread_local std::string message;
  using namespace accel::cuda;
  try {
    launch_clusters(copied, 1, Blocks{64, 256, 2}, Queue{nullptr, 1}, Call{out, fault});
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return "";
}

extern "C" const char* run_faulty(float* out, int fault) {
  static thread_local std::string message;
  using namespace accel::cuda;
  try {
    launch(faulty, 2, 64, Queue{nullptr, 1}, Call{out, fault});
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return "";
}

extern "C" float widened(int bits, int is_half) {
  using namespace accel::cuda;
  const auto word = static_cast<uint16_t>(bits);
  return is_half ? to_float(bits_as<__half>(word)) : to_float(bits_as<__nv_bfloat16>(word));
}

extern "C" int narrowed(float value, int is_half) {
  using namespace accel::cuda;
  return is_half ? bits_as<uint16_t>(from_float<__half>(value))
                 : bits_as<uint16_t>(from_float<__nv_bfloat16>(value));
}
