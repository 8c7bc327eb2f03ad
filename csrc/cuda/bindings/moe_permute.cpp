#include "moe_permute.h"

#include <limits>
#include <optional>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "accel/cuda/op.h"

namespace accel::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Indices are 32 bits wide.
constexpr int64_t kMost = std::numeric_limits<int>::max() - 1024;

// A row map, contiguous, and its inverse if it was asked for.
class RowMap {
 public:
  RowMap(const char* op, const Tensor& row_map, const Tensor& beside, int64_t num_tokens)
      : row_map_(row_map.contiguous()) {
    ACCEL_CHECK_VALUE(row_map.dim() == 1 && row_map.scalar_type() == at::kLong &&
                          row_map.device() == beside.device(),
                      op, ": row_map must be int64 of shape [P] on ", beside.device(), ", got ",
                      row_map.scalar_type(), row_map.sizes(), " on ", row_map.device());
    ACCEL_CHECK_VALUE(num_tokens >= 0 && num_tokens <= kMost && row_map.numel() <= kMost, op,
                      " on CUDA takes up to ", kMost, " rows and tokens, got ", row_map.numel(), " and ",
                      num_tokens);
    map_.row_map = row_map_.const_data_ptr<int64_t>();
    map_.num_rows = static_cast<int>(row_map.numel());
    map_.num_tokens = static_cast<int>(num_tokens);
  }

  const MoeRows& map() const { return map_; }
  int64_t num_rows() const { return map_.num_rows; }
  bool is_empty() const { return map_.num_rows == 0 || map_.num_tokens == 0; }

  const MoeRows& with_inverse(Queue queue) {
    const int64_t num_counts = int64_t{map_.num_tokens} + 1;
    inverse_ = at::zeros({1 + 2 * num_counts + map_.num_rows}, row_map_.options().dtype(at::kInt));
    map_.num_listed = inverse_.mutable_data_ptr<int>();
    map_.counts = map_.num_listed + 1;
    map_.ends = map_.counts + num_counts;
    map_.rows = map_.ends + num_counts;
    moe_list_rows(map_, queue);
    return map_;
  }

 private:
  Tensor row_map_, inverse_;
  MoeRows map_{};
};

void check_rows(const char* op, const char* name, const Tensor& rows) {
  ACCEL_CHECK_VALUE(rows.dim() == 2, op, ": ", name, " must have shape [rows, N], got ", rows.sizes());
}

void check_num_rows(const char* op, const char* name, const Tensor& rows, const RowMap& map) {
  ACCEL_CHECK_VALUE(rows.size(0) == map.num_rows(), op, ": ", name, " must have ", map.num_rows(),
                    " rows like row_map, got ", rows.sizes());
}

// 0 for probabilities [P], one for each row.
int check_probs(const char* op, const Tensor& probs, const Tensor& beside, const RowMap& map) {
  const int64_t num_tokens = map.map().num_tokens;
  const bool by_row = probs.dim() == 1 && probs.size(0) == map.num_rows();
  ACCEL_CHECK_VALUE(by_row || (probs.dim() == 2 && probs.size(0) == num_tokens), op,
                    ": probs must have shape [", num_tokens, ", E] or [", map.num_rows(),
                    "], one for each row, got ", probs.sizes());
  ACCEL_CHECK_VALUE(probs.is_floating_point() && probs.device() == beside.device(), op,
                    ": probs must be floating and on ", beside.device(), ", got ", probs.scalar_type(),
                    " on ", probs.device());
  ACCEL_CHECK_VALUE(by_row || probs.size(1) >= 1 || map.num_rows() == 0, op,
                    ": probs must have at least one expert, got ", probs.sizes());
  ACCEL_CHECK_VALUE(by_row || probs.numel() <= kMost, op, " on CUDA takes up to ", kMost,
                    " probabilities, got ", probs.sizes());
  return by_row ? 0 : static_cast<int>(probs.size(1));
}

// What a kernel computes with: float64 is rounded to float32.
Tensor computable(const Tensor& floats) {
  return (floats.scalar_type() == at::kDouble ? floats.to(at::kFloat) : floats).contiguous();
}

at::ScalarType computable(at::ScalarType dtype) { return dtype == at::kDouble ? at::kFloat : dtype; }

AnyFloats floats_of(const Tensor& tensor, const char* op) {
  if (!tensor.defined()) return {};
  return {const_cast<void*>(tensor.const_data_ptr()), dtype_of(tensor.scalar_type(), op)};
}

// The token of each row, and its probability; zeros for padding.
std::tuple<Tensor, Tensor> copy(
    const char* op, const Tensor& tokens_in, const Tensor& row_map, const OptionalTensor& probs_in) {
  const OnDeviceOf device(tokens_in);
  RowMap map(op, row_map, tokens_in, tokens_in.size(0));
  dtype_of(tokens_in.scalar_type(), op);
  const Tensor tokens = tokens_in.contiguous();
  const int64_t num_cols = tokens.size(1);
  Tensor rows = at::empty({map.num_rows(), num_cols}, tokens.options()), probs, row_probs;
  if (probs_in) {
    ACCEL_CHECK_VALUE(probs_in->dim() == 2, op, ": probs must have shape [", tokens.size(0),
                      ", E], got ", probs_in->sizes());
    check_probs(op, *probs_in, tokens, map);
    probs = probs_in->contiguous();
    row_probs = at::empty({map.num_rows()}, probs.options());
  } else {
    row_probs = at::empty({0}, tokens.options());
  }
  if (map.is_empty()) return {rows.zero_(), row_probs.zero_()};
  MoeCopy call{
      .map = map.map(),
      .tokens = tokens.const_data_ptr(),
      .rows = rows.mutable_data_ptr(),
      .probs = probs.defined() ? probs.const_data_ptr() : nullptr,
      .row_probs = row_probs.mutable_data_ptr(),
      .num_cols = num_cols,
      .num_experts = probs.defined() ? static_cast<int>(probs.size(1)) : 0,
      .element_bytes = static_cast<int>(tokens.element_size()),
      .prob_bytes = probs.defined() ? static_cast<int>(probs.element_size()) : 0};
  const Queue queue = device.queue();
  const int64_t row_bytes = num_cols * tokens.element_size();
  if (moe_listing_pays(map.num_rows(), tokens.size(0), row_bytes, queue.num_processors)) {
    call.map = map.with_inverse(queue);
    moe_copy_token_by_token(call, queue);
  } else {
    moe_copy_row_by_row(call, queue);
  }
  device.check_launch();
  return {rows, row_probs};
}

// The sum of each token's rows, and of their dweights.
Tensor sum(const char* op, const Tensor& rows_in, RowMap& map, const Tensor& weights,
           const Tensor& dweights, const Tensor& dprobs, int num_experts, const OnDeviceOf& device) {
  const Dtype dtype = dtype_of(rows_in.scalar_type(), op);
  const Tensor rows = rows_in.contiguous();
  Tensor tokens = at::empty({map.map().num_tokens, rows.size(1)}, rows.options());
  if (map.is_empty()) {
    if (dprobs.defined()) dprobs.zero_();
    return tokens.zero_();
  }
  if (tokens.numel() == 0 && !dprobs.defined()) return tokens;
  const Queue queue = device.queue();
  moe_sum(
      {.map = map.with_inverse(queue),
       .rows = rows.const_data_ptr(),
       .tokens = tokens.mutable_data_ptr(),
       .weights = floats_of(weights, op),
       .dweights = floats_of(dweights, op),
       .dprobs = floats_of(dprobs, op),
       .num_cols = rows.size(1),
       .num_experts = num_experts,
       .dtype = dtype},
      queue);
  device.check_launch();
  return tokens;
}

std::tuple<Tensor, Tensor> permute(const Tensor& x, const Tensor& row_map, const OptionalTensor& probs) {
  check_rows("moe_permute", "x", x);
  return copy("moe_permute", x, row_map, probs);
}

std::tuple<Tensor, Tensor> permute_backward(
    const Tensor& dy, const Tensor& dw, const Tensor& row_map, int64_t num_tokens, int64_t num_experts,
    at::ScalarType probs_dtype) {
  constexpr const char* op = "moe_permute backward";
  check_rows(op, "dy", dy);
  const OnDeviceOf device(dy);
  RowMap map(op, row_map, dy, num_tokens);
  check_num_rows(op, "dy", dy, map);
  const auto like_probs = dy.options().dtype(probs_dtype);
  if (num_experts == 0) {
    return {sum(op, dy, map, {}, {}, {}, 0, device), at::empty({0}, like_probs)};
  }
  ACCEL_CHECK_VALUE(dw.dim() == 1 && dw.size(0) == map.num_rows() && dw.device() == dy.device(), op,
                    ": the gradient of the permuted probs must have shape [", map.num_rows(), "] on ",
                    dy.device(), ", got ", dw.sizes(), " on ", dw.device());
  const Tensor dprobs = at::empty({num_tokens, num_experts}, dy.options().dtype(computable(probs_dtype)));
  const int experts = check_probs(op, dprobs, dy, map);
  const Tensor dx = sum(op, dy, map, {}, computable(dw), dprobs, experts, device);
  return {dx, dprobs.to(probs_dtype)};
}

Tensor unpermute(
    const Tensor& y, const Tensor& row_map, int64_t num_tokens, const OptionalTensor& probs) {
  constexpr const char* op = "moe_unpermute";
  check_rows(op, "y", y);
  const OnDeviceOf device(y);
  RowMap map(op, row_map, y, num_tokens);
  check_num_rows(op, "y", y, map);
  if (!probs) return sum(op, y, map, {}, {}, {}, 0, device);
  const int num_experts = check_probs(op, *probs, y, map);
  return sum(op, y, map, computable(*probs), {}, {}, num_experts, device);
}

Tensor unpermute_backward(const Tensor& dout, const Tensor& row_map) {
  check_rows("moe_unpermute backward", "dout", dout);
  return std::get<0>(copy("moe_unpermute backward", dout, row_map, {}));
}

std::tuple<Tensor, Tensor> unpermute_probs_backward(
    const Tensor& dout_in, const Tensor& y_in, const Tensor& row_map, const Tensor& probs_in) {
  constexpr const char* op = "moe_unpermute backward";
  check_rows(op, "dout", dout_in);
  const OnDeviceOf device(dout_in);
  RowMap map(op, row_map, dout_in, dout_in.size(0));
  const int64_t num_cols = dout_in.size(1);
  ACCEL_CHECK_VALUE(y_in.dim() == 2 && y_in.size(0) == map.num_rows() && y_in.size(1) == num_cols &&
                        y_in.scalar_type() == dout_in.scalar_type() && y_in.device() == dout_in.device(),
                    op, ": y must be ", dout_in.scalar_type(), " of shape [", map.num_rows(), ", ", num_cols,
                    "] on ", dout_in.device(), ", got ", y_in.scalar_type(), y_in.sizes(), " on ",
                    y_in.device());
  const int num_experts = check_probs(op, probs_in, dout_in, map);
  const bool by_row = probs_in.dim() == 1;
  const Dtype dtype = dtype_of(dout_in.scalar_type(), op);
  const Tensor dout = dout_in.contiguous(), y = y_in.contiguous(), probs = computable(probs_in);
  Tensor dy = at::empty(y.sizes(), y.options()), dprobs = at::empty(probs.sizes(), probs.options());
  if (map.is_empty() || num_cols == 0) return {dy.zero_(), dprobs.zero_().to(probs_in.scalar_type())};
  const Tensor dweights =
      by_row ? dprobs : at::empty({map.num_rows()}, dout.options().dtype(at::kFloat));
  const Queue queue = device.queue();
  moe_weigh(
      {.map = map.with_inverse(queue),
       .dtokens = dout.const_data_ptr(),
       .rows = y.const_data_ptr(),
       .drows = dy.mutable_data_ptr(),
       .weights = floats_of(probs, op),
       .dweights = floats_of(dweights, op),
       .dprobs = by_row ? AnyFloats{} : floats_of(dprobs, op),
       .num_cols = num_cols,
       .num_experts = num_experts,
       .dtype = dtype},
      queue);
  device.check_launch();
  return {dy, dprobs.to(probs_in.scalar_type())};
}

Tensor row_map(const Tensor& routing_map_in, int64_t num_rows, int64_t capacity, int64_t align) {
  constexpr const char* op = "moe_row_map";
  ACCEL_CHECK_VALUE(routing_map_in.dim() == 2 && routing_map_in.scalar_type() == at::kBool, op,
                    ": routing_map must be bool of shape [T, E], got ", routing_map_in.scalar_type(),
                    routing_map_in.sizes());
  ACCEL_CHECK_VALUE(num_rows >= 0 && align >= 1, op,
                    ": num_rows must not be negative and align be 1 or more, got ", num_rows, " and ", align);
  const int64_t num_tokens = routing_map_in.size(0), num_experts = routing_map_in.size(1);
  const auto int64 = routing_map_in.options().dtype(at::kLong);
  if (routing_map_in.numel() == 0 || num_rows == 0) return at::full({num_rows}, -1, int64);
  const bool fits = num_rows <= kMost && align <= kMost && capacity <= kMost &&
      num_tokens * num_experts + align * num_experts <= kMost &&
      std::max<int64_t>(capacity, 0) * num_experts <= kMost;
  ACCEL_CHECK_VALUE(fits, op, " on CUDA counts rows to ", kMost, ", got ", num_tokens, " tokens for ",
                    num_experts, " experts in ", num_rows, " rows with capacity ", capacity, " and align ",
                    align);
  const OnDeviceOf device(routing_map_in);
  const Tensor routing_map = routing_map_in.contiguous();
  Tensor row_map = at::empty({num_rows}, int64);
  const int num_blocks = moe_routing_blocks(static_cast<int>(num_tokens));
  Tensor counts = at::empty({num_blocks, num_experts}, int64.dtype(at::kInt));
  moe_row_map(
      {.routing_map = routing_map.const_data_ptr<bool>(),
       .row_map = row_map.mutable_data_ptr<int64_t>(),
       .counts = counts.mutable_data_ptr<int>(),
       .num_tokens = static_cast<int>(num_tokens),
       .num_experts = static_cast<int>(num_experts),
       .num_rows = static_cast<int>(num_rows),
       .capacity = static_cast<int>(std::max<int64_t>(capacity, -1)),
       .align = static_cast<int>(align)},
      device.queue());
  device.check_launch();
  return row_map;
}

}  // namespace

void register_moe_permute(torch::Library& library) {
  library.impl("moe_row_map", &row_map);
  library.impl("moe_permute_fwd", &permute);
  library.impl("moe_permute_bwd", &permute_backward);
  library.impl("moe_unpermute_fwd", &unpermute);
  library.impl("moe_unpermute_bwd", &unpermute_backward);
  library.impl("moe_unpermute_probs_bwd", &unpermute_probs_backward);
}

}  // namespace accel::cuda
