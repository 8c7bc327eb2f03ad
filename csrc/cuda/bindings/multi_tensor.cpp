#include "multi_tensor.h"

#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "accel/cuda/op.h"

namespace accel::cuda {
namespace {

using at::Tensor;
using at::TensorList;

// The kernels see memory, not shapes: each tensor must be as long as its neighbour in `like`.
void check_list(const char* op, const char* name, TensorList tensors, TensorList like) {
  ACCEL_CHECK_VALUE(tensors.size() == like.size(), op, ": needs one of ", name, " for each source, ",
                    like.size(), ", got ", tensors.size());
  const at::ScalarType dtype = tensors[0].scalar_type();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    ACCEL_CHECK_VALUE(t.scalar_type() == dtype && t.device() == like[0].device() &&
                          t.sizes() == like[i].sizes() && t.is_contiguous(),
                      op, ": ", name, "[", i, "] must be contiguous, ", dtype, ", on ", like[0].device(),
                      " and of shape ", like[i].sizes(), ", got ", t.scalar_type(), " on ", t.device(),
                      ", shape ", t.sizes(), ", strides ", t.strides());
  }
}

Tensor norm(TensorList tensors) {
  if (tensors.empty()) return at::zeros({});
  check_list("l2_norm", "tensors", tensors, tensors);
  const Dtype dtype = dtype_of(tensors[0].scalar_type(), "l2_norm");
  std::vector<SquaredTensor> squared;
  for (const Tensor& t : tensors) squared.push_back({t.const_data_ptr(), t.numel()});
  const auto count = static_cast<int64_t>(squared.size());
  const OnDeviceOf device(tensors[0]);
  Tensor sums = at::empty(
      {num_sums_of_squares(squared.data(), count)}, tensors[0].options().dtype(at::kDouble));
  Tensor norm = at::empty({}, tensors[0].options().dtype(at::kFloat));
  l2_norm(squared.data(), count, dtype, sums.mutable_data_ptr<double>(), norm.mutable_data_ptr<float>(),
          device.queue());
  device.check_launch();
  return norm;
}

void scale_all(TensorList sources, TensorList targets, double factor) {
  if (sources.empty() && targets.empty()) return;
  ACCEL_CHECK_VALUE(!sources.empty() && !targets.empty(), "scale: needs one of targets for each source, ",
                    sources.size(), ", got ", targets.size());
  check_list("scale", "sources", sources, sources);
  check_list("scale", "targets", targets, sources);
  std::vector<ScaledTensor> scaled;
  for (size_t i = 0; i < sources.size(); ++i) {
    scaled.push_back({sources[i].const_data_ptr(), targets[i].mutable_data_ptr(), sources[i].numel()});
  }
  const OnDeviceOf device(sources[0]);
  scale(scaled.data(), static_cast<int64_t>(scaled.size()), dtype_of(sources[0].scalar_type(), "scale"),
        dtype_of(targets[0].scalar_type(), "scale"), static_cast<float>(factor), device.queue());
  device.check_launch();
  for (const Tensor& t : targets) t.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

void register_multi_tensor(torch::Library& library) {
  library.impl("l2_norm", &norm);
  library.impl("scale_", &scale_all);
}

}  // namespace accel::cuda
