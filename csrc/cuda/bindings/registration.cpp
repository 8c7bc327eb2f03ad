// How Python takes the CUDA kernels into use: accel/ops/_cuda.py loads this library, sees that it fits the
// PyTorch and the GPU at hand, and only then has it register them. (A static TORCH_LIBRARY_IMPL would
// have done so before anyone can ask.)

#include <atomic>
#include <optional>
#include <string>

#include <torch/version.h>

#include "accel/cuda/op.h"
#ifdef ACCEL_CUDA_ON_CPU
#include "emulator/cuda_on_cpu.h"
#endif

#ifndef ACCEL_CUDA_ARCHS
#define ACCEL_CUDA_ARCHS ""
#endif

namespace accel::cuda {

#ifndef ACCEL_CUDA_ON_CPU
int num_processors(c10::DeviceIndex device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> counts[kMaxDevices];
  int count = device < kMaxDevices ? counts[device].load(std::memory_order_relaxed) : 0;
  if (count) return count;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (device < kMaxDevices) counts[device].store(count, std::memory_order_relaxed);
  return count;
}
#endif

namespace {

// The first call registers; others change nothing.
void register_kernels() {
#ifdef ACCEL_CUDA_ON_CPU
  static torch::Library library(
      torch::Library::IMPL, "accel_emulated", c10::DispatchKey::CPU, __FILE__, __LINE__);
#else
  static torch::Library library(
      torch::Library::IMPL, "accel", c10::DispatchKey::CUDA, __FILE__, __LINE__);
#endif
  static const bool done = [] {
    register_activation(library);
    register_adamw(library);
    register_add_rms_norm(library);
    register_cross_entropy(library);
    register_layer_norm(library);
    register_moe_permute(library);
    register_multi_tensor(library);
    register_qkv_rope(library);
    register_rms_norm(library);
    register_rope(library);
    return true;
  }();
  (void)done;
}

#ifdef ACCEL_CUDA_ON_CPU
TORCH_LIBRARY_FRAGMENT(accel_emulated, m) {
  m.def("_register_kernels() -> ()", &register_kernels);
  m.def("_have_bulk_copies(bool they_are_there) -> ()", [](bool they_are_there) {
    emulator::has_bulk_copies = they_are_there;
  });
}
#else
TORCH_LIBRARY_FRAGMENT(accel, m) {
  m.def("_cuda_torch_version() -> str", [] { return std::string(TORCH_VERSION); });
  m.def("_cuda_architectures() -> str", [] { return std::string(ACCEL_CUDA_ARCHS); });
  m.def("_cuda_register_kernels() -> ()", &register_kernels);
}
#endif

}  // namespace
}  // namespace accel::cuda
