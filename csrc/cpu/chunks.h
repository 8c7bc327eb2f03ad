// Many tensors as one range of work: what optimizers have is hundreds of tensors, of 1 to 10^9 elements.
//
// Each tensor is cut into chunks of a fixed number of elements, from its start. Threads share the
// chunks, not the tensors, so one call keeps all of them busy; and where an element stands in its
// chunk depends on its tensor alone, so the number of threads changes no bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include "accel/check.h"

namespace accel {

class Chunks {
 public:
  static constexpr int64_t kElements = 1 << 14;  // 4 tensors of fp32: 256 KiB, 10 us of one core

  explicit Chunks(at::TensorList tensors) : first_{0} {
    first_.reserve(tensors.size() + 1);
    for (const at::Tensor& tensor : tensors) {
      first_.push_back(first_.back() + at::divup(tensor.numel(), kElements));
    }
  }

  int64_t count() const { return first_.back(); }
  int64_t first(int64_t tensor) const { return first_[tensor]; }

  // Calls f(tensor, first chunk, last chunk + 1), chunks counted within the tensor, until every
  // chunk was in one call.
  template <typename F>
  void parallel(F f) const {
    at::parallel_for(0, count(), 2, [&](int64_t begin, int64_t end) {
      int64_t tensor = std::upper_bound(first_.begin(), first_.end(), begin) - first_.begin() - 1;
      for (; begin < end; ++tensor) {
        const int64_t stop = std::min(end, first_[tensor + 1]);
        if (begin < stop) f(tensor, begin - first_[tensor], stop - first_[tensor]);
        begin = std::max(begin, stop);
      }
    });
  }

 private:
  std::vector<int64_t> first_;  // of each tensor, and the count
};

// The kernels see memory, not shapes: each tensor must lie in memory as the first of its row does.
inline void check_list(
    const char* op, const char* name, at::TensorList tensors, at::TensorList like) {
  ACCEL_CHECK_VALUE(tensors.size() == like.size(), op, ": needs one of ", name,
                    " for each parameter, ", like.size(), ", got ", tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensors[i];
    ACCEL_CHECK_VALUE(t.sizes() == like[i].sizes() && t.is_contiguous() && t.device().is_cpu(), op,
                      ": ", name, "[", i, "] must be contiguous, of shape ", like[i].sizes(),
                      " and on the CPU, got shape ", t.sizes(), ", strides ", t.strides(), " on ",
                      t.device());
    ACCEL_CHECK_VALUE(t.scalar_type() == tensors[0].scalar_type(), op, ": ", name,
                      " must be of one dtype, got ", tensors[0].scalar_type(), " and ",
                      t.scalar_type());
  }
}

// Tells autograd that these were changed in place, as PyTorch's own in-place operators do.
inline void bump_versions(at::TensorList tensors) {
  for (const at::Tensor& t : tensors) t.unsafeGetTensorImpl()->bump_version();
}

}  // namespace accel
