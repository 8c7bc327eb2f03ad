// Every native op, by device. The schemas and their meaning live in accel/ops/<name>.py.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

namespace accel {

// csrc/cpu/rms_norm.cpp
std::tuple<at::Tensor, at::Tensor> rms_norm_fwd_cpu(
    const at::Tensor& x, const at::Tensor& weight, double eps, bool zero_centered);
std::tuple<at::Tensor, at::Tensor> rms_norm_bwd_cpu(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd,
    bool zero_centered);

// csrc/cpu/layer_norm.cpp
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_fwd_cpu(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
    bool zero_centered);
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_bwd_cpu(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean,
    const at::Tensor& rstd, bool zero_centered);

// csrc/autograd.cpp: the same forwards, recording the backward
std::tuple<at::Tensor, at::Tensor> rms_norm_fwd_autograd(
    const at::Tensor& x, const at::Tensor& weight, double eps, bool zero_centered);
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_fwd_autograd(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
    bool zero_centered);

// csrc/cpu/host_memory.cpp
void host_memory_install();
void host_memory_uninstall();
std::vector<int64_t> host_memory_stats();  // current bytes, peak bytes, allocations, frees
void host_memory_reset_peak();

}  // namespace accel
