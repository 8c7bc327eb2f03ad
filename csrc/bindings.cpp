// What the library tells PyTorch: which kernel serves which op on which device.
//
// The norm ops are defined, with their schemas, fakes and gradients, in accel/ops/<name>.py, so
// that they exist with or without this library.

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
#include <torch/version.h>

#include "accel/isa.h"
#include "accel/ops.h"

TORCH_LIBRARY_IMPL(accel, CPU, m) {
  m.impl("rms_norm_fwd", &accel::rms_norm_fwd_cpu);
  m.impl("rms_norm_bwd", &accel::rms_norm_bwd_cpu);
  m.impl("layer_norm_fwd", &accel::layer_norm_fwd_cpu);
  m.impl("layer_norm_bwd", &accel::layer_norm_bwd_cpu);
}

TORCH_LIBRARY_IMPL(accel, AutogradCPU, m) {
  m.impl("rms_norm_fwd", &accel::rms_norm_fwd_autograd);
  m.impl("layer_norm_fwd", &accel::layer_norm_fwd_autograd);
  // A second derivative is an error that says so, never a zero.
  m.impl("rms_norm_bwd", torch::autograd::autogradNotImplementedFallback());
  m.impl("layer_norm_bwd", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_FRAGMENT(accel, m) {
  m.def("_native_torch_version() -> str", [] { return std::string(TORCH_VERSION); });
  m.def("_native_isa() -> str", [] { return std::string(accel::isa_name(accel::isa())); });

  m.def("_host_memory_install() -> ()", &accel::host_memory_install);
  m.def("_host_memory_uninstall() -> ()", &accel::host_memory_uninstall);
  m.def("_host_memory_stats() -> int[]", &accel::host_memory_stats);
  m.def("_host_memory_reset_peak() -> ()", &accel::host_memory_reset_peak);
}
