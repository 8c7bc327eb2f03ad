// Where torch.clamp has a gradient.
#pragma once

#include <cmath>

#include <torch/version.h>

namespace accel {

// The largest value that, clamped to `limit`, passes its gradient on: at the limit itself torch does so before
// 2.14, and no longer. As `gradient_limit` in accel/ops/activation.py.
inline float gradient_limit(float limit) {
  constexpr bool kPassesAtLimit = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14;
  return kPassesAtLimit || std::isinf(limit) ? limit : std::nextafter(limit, -INFINITY);
}

}  // namespace accel
