// What an op of csrc/cuda does before and after it launches: the current device and stream, and the check
// that the launch went well. Compiled by g++; with ACCEL_CUDA_ON_CPU for the emulator, where tensors are
// on the CPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "accel/check.h"
#include "accel/cuda/launch.h"

#ifndef ACCEL_CUDA_ON_CPU
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace accel::cuda {

inline Dtype dtype_of(at::ScalarType dtype, const char* op) {
  ACCEL_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, op,
                    " on CUDA takes float32, bfloat16 or float16, got ", dtype);
  if (dtype == at::kFloat) return Dtype::float32;
  return dtype == at::kBFloat16 ? Dtype::bfloat16 : Dtype::float16;
}

// The same elements, side by side, from a multiple of 16 bytes on where that is asked for.
inline at::Tensor contiguous(const at::Tensor& tensor, bool in_whole_packs) {
  const at::Tensor side_by_side = tensor.contiguous();
  const bool begins_well = reinterpret_cast<uintptr_t>(side_by_side.const_data_ptr()) % kPackBytes == 0;
  return in_whole_packs && !begins_well ? side_by_side.clone() : side_by_side;
}

#ifdef ACCEL_CUDA_ON_CPU

struct OnDeviceOf {
  explicit OnDeviceOf(const at::Tensor&) {}
  // Few, since each block costs much here, and odd, so that rows do not divide by it.
  Queue queue() const { return {nullptr, 3}; }
  bool is_capturing() const { return false; }
  void check_launch() const {}  // the emulator throws
};

#else

int num_processors(c10::DeviceIndex device);

// Launches go to the device of `tensor` for as long as this lives.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const at::Tensor& tensor) : guard_(tensor.device()) {}
  Queue queue() const {
    const c10::DeviceIndex device = guard_.current_device().index();
    return {c10::cuda::getCurrentCUDAStream(device).stream(), num_processors(device)};
  }
  // Whether a CUDA graph records what is launched.
  bool is_capturing() const {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
  void check_launch() const { C10_CUDA_KERNEL_LAUNCH_CHECK(); }

 private:
  c10::cuda::CUDAGuard guard_;
};

#endif

// Each op's kernels, for the dispatch key of `library`.
void register_activation(torch::Library& library);
void register_adamw(torch::Library& library);
void register_add_rms_norm(torch::Library& library);
void register_cross_entropy(torch::Library& library);
void register_layer_norm(torch::Library& library);
void register_moe_permute(torch::Library& library);
void register_multi_tensor(torch::Library& library);
void register_qkv_rope(torch::Library& library);
void register_rms_norm(torch::Library& library);
void register_rope(torch::Library& library);

}  // namespace accel::cuda
