// Products of many pairs of matrices, several at a time: grouped_gemm's. The maths: accel/ops/grouped_gemm.py.
//
// Each product is ATen's, on one thread. ATen's own threads would share each product instead, and few rows are
// little to share: of products of 128 rows, 512 and 2048 columns in fp32 an AMD Zen 4 makes 85 GFLOP/s on one
// thread, and 111 on two that share each. A product that would keep one thread busy long after the others are
// done is shared after all.

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "accel/check.h"

namespace accel {
namespace {

using at::Tensor;
using at::TensorList;

// Of its threads' speed, what a product that they share may be expected to reach.
constexpr double kSharedEfficiency = 0.8;
// Multiplications; fewer in all are done before other threads are awake.
constexpr double kWorthThreads = 1 << 18;

struct Product {
  const Tensor &out, &a, &b;
  double cost() const { return static_cast<double>(out.numel()) * a.size(1); }
  void compute(bool add) const {
    Tensor into = out;
    if (add) {
      at::addmm_out(into, out, a, b);
    } else {
      at::mm_out(into, a, b);
    }
  }
};

// What the busiest thread has to do if each takes the next product as soon as it is free; the costs fall.
double busiest(const double* costs, int64_t count, int64_t threads) {
  std::vector<double> busy(threads, 0.0);
  for (int64_t i = 0; i < count; ++i) {
    std::pop_heap(busy.begin(), busy.end(), std::greater<>());
    busy.back() += costs[i];
    std::push_heap(busy.begin(), busy.end(), std::greater<>());
  }
  return *std::max_element(busy.begin(), busy.end());
}

// How many of the products, whose costs fall, all threads should share one after the other.
int64_t count_shared(const std::vector<double>& costs) {
  const int64_t count = costs.size(), threads = at::get_num_threads();
  double left = std::accumulate(costs.begin(), costs.end(), 0.0);
  if (threads == 1 || at::in_parallel_region() || left < kWorthThreads) return count;
  int64_t shared = 0;
  while (shared < count &&
         busiest(&costs[shared], count - shared, threads) * threads * kSharedEfficiency > left) {
    left -= costs[shared++];
  }
  return shared;
}

void products(TensorList outs, TensorList as, TensorList bs, bool add) {
  ACCEL_CHECK_VALUE(outs.size() == as.size() && as.size() == bs.size(), "products: got ", outs.size(), ", ",
                    as.size(), " and ", bs.size(), " matrices");
  std::vector<Product> all;
  for (size_t i = 0; i < outs.size(); ++i) {
    ACCEL_CHECK_VALUE(outs[i].dim() == 2 && as[i].dim() == 2 && bs[i].dim() == 2 &&
                          outs[i].size(0) == as[i].size(0) && as[i].size(1) == bs[i].size(0) &&
                          outs[i].size(1) == bs[i].size(1),
                      "products: needs out [M, N], a [M, K] and b [K, N], got ", outs[i].sizes(), ", ",
                      as[i].sizes(), " and ", bs[i].sizes());
    all.push_back({outs[i], as[i], bs[i]});
  }
  std::vector<int64_t> order(all.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t i, int64_t j) { return all[i].cost() > all[j].cost(); });
  std::vector<double> costs;
  for (const int64_t i : order) costs.push_back(all[i].cost());

  const int64_t shared = count_shared(costs), count = all.size();
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    for (int64_t i = 0; i < shared; ++i) all[order[i]].compute(add);
  }
  std::atomic<int64_t> next{shared};
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count - shared);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const at::AutoDispatchBelowADInplaceOrView below;  // threads know of no mode, such as inference
    for (int64_t i = next++; i < count; i = next++) all[order[i]].compute(add);
  });
  for (const Tensor& out : outs) out.unsafeGetTensorImpl()->bump_version();  // whoever saved one must hear
}

TORCH_LIBRARY_FRAGMENT(accel, m) {
  m.def("_products(Tensor(a!)[] outs, Tensor[] a, Tensor[] b, bool add) -> ()");
}

TORCH_LIBRARY_IMPL(accel, CPU, m) { m.impl("_products", &products); }

}  // namespace
}  // namespace accel
