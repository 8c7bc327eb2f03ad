#include "accel/cuda/bulk_copy.h"

#include <atomic>

namespace accel::cuda {

#ifdef __CUDACC__
namespace {

__global__ void compiled_for() {}

}  // namespace

bool has_bulk_copies() {
  constexpr int kMaxDevices = 64;
  enum : int { kUnknown, kNo, kYes };
  static std::atomic<int> known[kMaxDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return false;
  int answer = known[device].load(std::memory_order_relaxed);
  if (answer == kUnknown) {
    cudaFuncAttributes code{};
    int shared_bytes = 0;  // sm_120 has 99 KiB
    constexpr auto kOptIn = cudaDevAttrMaxSharedMemoryPerBlockOptin;
    if (cudaFuncGetAttributes(&code, compiled_for) != cudaSuccess ||
        cudaDeviceGetAttribute(&shared_bytes, kOptIn, device) != cudaSuccess) {
      return false;
    }
    answer = code.ptxVersion >= 90 && shared_bytes >= kMostSharedBytes ? kYes : kNo;
    known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == kYes;
}
#else
bool has_bulk_copies() { return emulator::has_bulk_copies; }
#endif

}  // namespace accel::cuda
