// Counts what PyTorch allocates on the CPU: a pass-through in front of PyTorch's own allocator.
//
// Bytes are what malloc really set aside (malloc_usable_size), asked at both ends, so nothing is
// kept per block. A block carries a deleter that needs no state of ours, and may outlive
// uninstall().

#include <malloc.h>

#include <atomic>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <torch/library.h>

#include "accel/check.h"

namespace accel {
namespace {

struct Counters {
  std::atomic<int64_t> current_bytes{0};
  std::atomic<int64_t> peak_bytes{0};
  std::atomic<int64_t> allocations{0};
  std::atomic<int64_t> frees{0};

  void on_allocate(int64_t num_bytes) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    const int64_t now = current_bytes.fetch_add(num_bytes, std::memory_order_relaxed) + num_bytes;
    int64_t peak = peak_bytes.load(std::memory_order_relaxed);
    while (now > peak &&
           !peak_bytes.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }

  void on_free(int64_t num_bytes) {
    frees.fetch_add(1, std::memory_order_relaxed);
    current_bytes.fetch_sub(num_bytes, std::memory_order_relaxed);
  }
};

Counters counters;

void counting_free(void* data) {
  counters.on_free(static_cast<int64_t>(malloc_usable_size(data)));
  c10::GetDefaultCPUAllocator()->raw_deleter()(data);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    c10::DataPtr block = c10::GetDefaultCPUAllocator()->allocate(num_bytes);
    void* data = block.get();
    if (data == nullptr) return block;  // 0 bytes
    counters.on_allocate(static_cast<int64_t>(malloc_usable_size(data)));
    block.release_context();
    return {data, data, &counting_free, block.device()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &counting_free; }

  void copy_data(void* dest, const void* src, std::size_t num_bytes) const override {
    default_copy_data(dest, src, num_bytes);
  }
};

CountingAllocator counting_allocator;

// PyTorch's allocator hands out what malloc gave, so malloc_usable_size may be asked. Somebody
// else's may not.
void swap_allocator(c10::Allocator* from, c10::Allocator* to) {
  if (c10::GetCPUAllocator() == to) return;
  ACCEL_CHECK(c10::GetCPUAllocator() == from,
              "host memory: another library has replaced PyTorch's CPU allocator; "
              "memory is counted only over PyTorch's own");
  c10::SetCPUAllocator(to);
  ACCEL_CHECK(c10::GetCPUAllocator() == to,
              "host memory: PyTorch's CPU allocator was set with a higher priority");
}

void install() {
  swap_allocator(c10::GetDefaultCPUAllocator(), &counting_allocator);
}

void uninstall() {
  swap_allocator(&counting_allocator, c10::GetDefaultCPUAllocator());
}

// Current bytes, peak bytes, allocations, frees.
std::vector<int64_t> stats() {
  return {counters.current_bytes.load(), counters.peak_bytes.load(), counters.allocations.load(),
          counters.frees.load()};
}

void reset_peak() { counters.peak_bytes.store(counters.current_bytes.load()); }

TORCH_LIBRARY_FRAGMENT(accel, m) {
  m.def("_host_memory_install() -> ()", &install);
  m.def("_host_memory_uninstall() -> ()", &uninstall);
  m.def("_host_memory_stats() -> int[]", &stats);
  m.def("_host_memory_reset_peak() -> ()", &reset_peak);
}

}  // namespace
}  // namespace accel
