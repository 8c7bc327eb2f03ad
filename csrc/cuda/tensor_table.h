// Many tensors in one launch. Where they lie is told by the launch's own arguments, as in torch's
// multi_tensor_apply: no table has to reach the device, so nothing is cached, no copy is waited for, and a
// CUDA graph holds it all. What does not fit into the 4 KB that every driver takes goes out in further
// launches.
#pragma once

#include "accel/cuda/device.h"

namespace accel::cuda {
namespace {

constexpr int kArgumentBytes = 4096;

// `Entry` tells where a tensor lies, and its `num_elements`; `Call` is what else the kernel is told.
template <typename Entry, typename Call>
struct TensorTable {
  static constexpr int kTensors =
      (kArgumentBytes - sizeof(Call) - 16) / (sizeof(Entry) + sizeof(unsigned));

  Call call;
  int num_tensors;
  unsigned first_chunk[kTensors];
  Entry tensors[kTensors];

  // The tensor that a block's chunk is of: blocks are chunks, those of a tensor side by side.
  ACCEL_DEVICE int tensor_of(unsigned chunk) const {
    int tensor = 0, beyond = num_tensors;
    while (beyond - tensor > 1) {
      const int middle = (tensor + beyond) / 2;
      (first_chunk[middle] <= chunk ? tensor : beyond) = middle;
    }
    return tensor;
  }
};

// launch(table, num_chunks, chunks_before) as often as it takes, in chunks of `chunk` elements.
template <typename Entry, typename Call, typename Launch>
void for_tables(const Entry* tensors, int64_t count, const Call& call, int64_t chunk, Launch&& launch) {
  using Table = TensorTable<Entry, Call>;
  static_assert(sizeof(Table) <= kArgumentBytes);
  Table table{.call = call, .num_tensors = 0, .first_chunk = {}, .tensors = {}};
  unsigned num_chunks = 0;
  int64_t before = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (tensors[i].num_elements > 0) {
      table.first_chunk[table.num_tensors] = num_chunks;
      table.tensors[table.num_tensors++] = tensors[i];
      num_chunks += static_cast<unsigned>(ceil_div(tensors[i].num_elements, chunk));
    }
    if (table.num_tensors == Table::kTensors || i + 1 == count) {
      launch(table, num_chunks, before);
      before += num_chunks;
      table.num_tensors = num_chunks = 0;
    }
  }
}

}  // namespace
}  // namespace accel::cuda
