#include "adamw.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "tensor_table.h"

// A thread has 4 elements at a time: 16 bytes of what is fp32, 8 of what has 16 bits, so that a warp reads
// whole lines of both. What hides the latency of memory is the number of threads.

namespace accel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 4;
constexpr int kElements = 4;
constexpr int kTurn = kThreads * kElements;
constexpr int kChunk = 8 * kTurn;  // elements of a block

using AdamwTable = TensorTable<AdamwTensor, Adamw>;

template <typename T>
struct alignas(kElements * sizeof(T)) Four {
  T element[kElements];
};

template <typename T>
ACCEL_DEVICE bool holds_fours(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Four<T>) == 0;
}

// This thread's four of the block's next elements, which begin at p. kWhole: side by side; else each beside
// those of the other threads, and only as far as `count`.
template <bool kWhole, typename T>
ACCEL_DEVICE Four<T> load_four(const T* p, int count) {
  if constexpr (kWhole) {
    check_aligned(p + kElements * threadIdx.x, sizeof(Four<T>));
    return reinterpret_cast<const Four<T>*>(p)[threadIdx.x];
  } else {
    Four<T> four{};
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      const int i = k * kThreads + static_cast<int>(threadIdx.x);
      if (i < count) four.element[k] = p[i];
    }
    return four;
  }
}

template <bool kWhole, typename T>
ACCEL_DEVICE void store_four(T* p, const Four<T>& four, int count) {
  if constexpr (kWhole) {
    check_aligned(p + kElements * threadIdx.x, sizeof(Four<T>));
    reinterpret_cast<Four<T>*>(p)[threadIdx.x] = four;
  } else {
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      const int i = k * kThreads + static_cast<int>(threadIdx.x);
      if (i < count) p[i] = four.element[k];
    }
  }
}

// No number rounds to a zero that is further from zero: a remainder below 0 is that of what the weight was
// before somebody else set it to zero.
ACCEL_DEVICE float joined(__nv_bfloat16 weight, int16_t remainder) {
  const uint32_t upper = static_cast<uint32_t>(bits_as<uint16_t>(weight)) << 16;
  const bool is_stale = upper << 1 == 0 && remainder < 0;
  return bits_as<float>(upper + (is_stale ? 0 : remainder));
}

ACCEL_DEVICE int16_t remainder_of(float master, __nv_bfloat16 weight) {
  const uint32_t upper = static_cast<uint32_t>(bits_as<uint16_t>(weight)) << 16;
  const uint32_t distance = bits_as<uint32_t>(master) - upper;
  // One too many for 16 bits: the distance of a tie that was rounded towards zero.
  return static_cast<int16_t>(distance == 0x8000u ? 0x7fffu : distance);
}

struct Nothing {};

// Copy: of the weight, or Nothing, or int16_t where the remainder lies in its place.
template <typename Grad, typename Copy>
struct Step {
  static constexpr bool kHasRemainder = std::is_same_v<Copy, int16_t>;
  static constexpr bool kHasCopy = !kHasRemainder && !std::is_same_v<Copy, Nothing>;
  using Weight = std::conditional_t<kHasRemainder, __nv_bfloat16, float>;

  Weight* weight;
  const Grad* grad;
  float* exp_avg;
  float* exp_avg_sq;
  Copy* beside;
  AdamwCorrection correction;
  float scale;

  ACCEL_DEVICE Step(const Adamw& op, const AdamwTensor& t)
      : weight(static_cast<Weight*>(t.weight)),
        grad(static_cast<const Grad*>(t.grad)),
        exp_avg(t.exp_avg),
        exp_avg_sq(t.exp_avg_sq),
        beside(static_cast<Copy*>(t.beside)),
        correction(t.correction_on_device ? *t.correction_on_device : t.correction),
        scale(op.scale_on_device ? *op.scale_on_device : op.scale) {}

  ACCEL_DEVICE bool is_aligned() const {
    bool all = holds_fours(weight) && holds_fours(grad) && holds_fours(exp_avg) && holds_fours(exp_avg_sq);
    if constexpr (kHasCopy || kHasRemainder) all = all && holds_fours(beside);
    return all;
  }

  // The block's next elements. The order of operations is torch.optim.Adam's; fused by hand, so that it is
  // the same bits wherever an element lies.
  template <bool kWhole>
  ACCEL_DEVICE void turn(const Adamw& op, int64_t at, int count) const {
    auto w_four = load_four<kWhole>(weight + at, count);
    const auto g_four = load_four<kWhole>(grad + at, count);
    auto m_four = load_four<kWhole>(exp_avg + at, count);
    auto v_four = load_four<kWhole>(exp_avg_sq + at, count);
    Four<Copy> beside_four;
    if constexpr (kHasRemainder) beside_four = load_four<kWhole>(beside + at, count);
    const bool from_average = op.one_minus_beta1 < 0.5f;  // interpolate from the nearer end, as lerp does
    const float to_other = from_average ? op.one_minus_beta1 : op.one_minus_beta1 - 1.0f;
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      float w;
      if constexpr (kHasRemainder) {
        w = joined(w_four.element[k], beside_four.element[k]);
      } else {
        w = w_four.element[k];
      }
      float &m = m_four.element[k], &v = v_four.element[k];
      const float g = fmaf(to_float(g_four.element[k]), scale, op.l2 != 0.0f ? op.l2 * w : 0.0f);
      m = fmaf(to_other, g - m, from_average ? m : g);
      v = fmaf(v, op.beta2, op.one_minus_beta2 * g * g);
      const float denominator = sqrtf(v) / correction.root_correction2 + op.eps;
      w = fmaf(w, op.decay, -(correction.step_size * m / denominator));
      if constexpr (kHasRemainder) {
        w_four.element[k] = from_float<__nv_bfloat16>(w);
        beside_four.element[k] = remainder_of(w, w_four.element[k]);
      } else {
        w_four.element[k] = w;
      }
      if constexpr (kHasCopy) beside_four.element[k] = from_float<Copy>(w);
    }
    store_four<kWhole>(exp_avg + at, m_four, count);
    store_four<kWhole>(exp_avg_sq + at, v_four, count);
    store_four<kWhole>(weight + at, w_four, count);
    if constexpr (kHasCopy || kHasRemainder) store_four<kWhole>(beside + at, beside_four, count);
  }
};

template <typename Grad, typename Copy>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) adamw_kernel(const AdamwTable table) {
  const int i = table.tensor_of(blockIdx.x);
  const Step<Grad, Copy> step(table.call, table.tensors[i]);
  const int64_t start = static_cast<int64_t>(blockIdx.x - table.first_chunk[i]) * kChunk;
  const int64_t left = table.tensors[i].num_elements - start;
  const int count = left < kChunk ? static_cast<int>(left) : kChunk;
  const bool is_aligned = step.is_aligned();
  for (int first = 0; first < count; first += kTurn) {
    if (is_aligned && count - first >= kTurn) {
      step.template turn<true>(table.call, start + first, kTurn);
    } else {
      step.template turn<false>(table.call, start + first, count - first);
    }
  }
}

__host__ __device__ inline AdamwCorrection correction_after(float step, const AdamwBias& bias) {
  if (!bias.is_corrected) return {static_cast<float>(bias.lr), 1.0f};
  const double t = step;
  return {static_cast<float>(bias.lr / (1.0 - pow(bias.beta1, t))),
          static_cast<float>(sqrt(1.0 - pow(bias.beta2, t)))};
}

constexpr int kSteps = 256;

struct AdvanceCall {
  float* steps[kSteps];
  AdamwCorrection* corrections;
  AdamwBias bias;
  int count;
};

// One block. A step that several parameters share is counted by each, and written by the last of them.
__global__ void __launch_bounds__(kSteps) advance_kernel(const AdvanceCall call) {
  const int mine = threadIdx.x;
  bool is_last = mine < call.count;
  float step = 0.0f;
  if (mine < call.count) {
    step = *call.steps[mine];
    for (int other = 0; other < call.count; ++other) {
      if (call.steps[other] != call.steps[mine]) continue;
      if (other <= mine) step += 1.0f;
      is_last = other <= mine;
    }
    call.corrections[mine] = correction_after(step, call.bias);
  }
  __syncthreads();  // all have read
  if (is_last) *call.steps[mine] = step;
}

template <typename Grad>
auto kernel_for(Beside beside) {
  switch (beside) {
    case Beside::float32: return &adamw_kernel<Grad, float>;
    case Beside::bfloat16: return &adamw_kernel<Grad, __nv_bfloat16>;
    case Beside::float16: return &adamw_kernel<Grad, __half>;
    case Beside::remainder: return &adamw_kernel<Grad, int16_t>;
    default: return &adamw_kernel<Grad, Nothing>;
  }
}

}  // namespace

AdamwCorrection adamw_advance(float* step, const AdamwBias& bias) {
  return correction_after(*step += 1.0f, bias);
}

void adamw_advance(
    float* const* steps, int64_t count, const AdamwBias& bias, AdamwCorrection* corrections_P, Queue queue) {
  for (int64_t first = 0; first < count; first += kSteps) {
    AdvanceCall call{
        .steps = {},
        .corrections = corrections_P + first,
        .bias = bias,
        .count = static_cast<int>(std::min<int64_t>(kSteps, count - first))};
    std::copy_n(steps + first, call.count, call.steps);
    const auto num_threads = static_cast<unsigned>(ceil_div(call.count, kWarp) * kWarp);
    launch(advance_kernel, 1, num_threads, queue, call);
  }
}

void adamw(const AdamwTensor* tensors, int64_t count, const Adamw& op, Queue queue) {
  auto* kernel = for_dtype(op.grad_dtype, [&]<typename Grad> { return kernel_for<Grad>(op.beside); });
  for_tables(tensors, count, op, kChunk, [&](const auto& table, unsigned num_chunks, int64_t) {
    launch(kernel, num_chunks, kThreads, queue, table);
  });
}

}  // namespace accel::cuda
