#include "accel/cuda/bulk_copy.h"

#include <atomic>

namespace accel::cuda {

#ifdef __CUDACC__
namespace {

__global__ void compiled_for() {}

}  // namespace

bool has_bulk_copies() {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> versions[kMaxDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return false;
  int version = versions[device].load(std::memory_order_relaxed);
  if (!version) {
    cudaFuncAttributes code{};
    if (cudaFuncGetAttributes(&code, compiled_for) != cudaSuccess) return false;
    version = code.ptxVersion;
    versions[device].store(version, std::memory_order_relaxed);
  }
  return version >= 90;
}
#else
bool has_bulk_copies() { return emulator::has_bulk_copies; }
#endif

}  // namespace accel::cuda
