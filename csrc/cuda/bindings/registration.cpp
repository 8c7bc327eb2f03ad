// How Python takes the CUDA kernels into use: accel/ops/_cuda.py loads this library, sees that it fits the
// PyTorch and the GPU at hand, and only then has it register them. (A static TORCH_LIBRARY_IMPL would
// have done so before anyone can ask.)

#include <atomic>
#include <optional>
#include <string>

#include <torch/version.h>

#include "accel/cuda/op.h"

#ifndef ACCEL_CUDA_ARCHS
#define ACCEL_CUDA_ARCHS ""
#endif

namespace accel::cuda {

#ifndef ACCEL_CUDA_ON_CPU
namespace {

// An attribute that is never 0, asked once of each device.
template <cudaDeviceAttr kAttribute>
int attribute_of(c10::DeviceIndex device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];
  int value = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (value) return value;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, kAttribute, device));
  if (device < kMaxDevices) known[device].store(value, std::memory_order_relaxed);
  return value;
}

}  // namespace

int num_processors(c10::DeviceIndex device) {
  return attribute_of<cudaDevAttrMultiProcessorCount>(device);
}

size_t shared_bytes(c10::DeviceIndex device) {
  return attribute_of<cudaDevAttrMaxSharedMemoryPerBlockOptin>(device);
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
    register_rms_norm(library);
    register_rope(library);
    return true;
  }();
  (void)done;
}

#ifdef ACCEL_CUDA_ON_CPU
TORCH_LIBRARY_FRAGMENT(accel_emulated, m) {
  m.def("_register_kernels() -> ()", &register_kernels);
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
