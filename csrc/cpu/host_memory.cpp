// Counts and limits what PyTorch allocates on the CPU, and asks for huge pages under it: a pass-through in
// front of PyTorch's own allocator.
//
// Bytes are what malloc really set aside (malloc_usable_size), asked at both ends, so nothing is
// kept per block. A block carries a deleter that needs no state of ours, and may outlive
// uninstall(). The deleter also says which kind of block it is: counted, or allocated while its
// thread was uncounted, which is what the CPU device runtime calls pinned.

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <torch/library.h>

#include "accel/check.h"

namespace accel {
namespace {

constexpr int64_t NO_LIMIT = std::numeric_limits<int64_t>::max();

struct Counters {
  std::atomic<int64_t> limit_bytes{NO_LIMIT};
  std::atomic<int64_t> current_bytes{0};
  std::atomic<int64_t> peak_bytes{0};
  std::atomic<int64_t> allocations{0};
  std::atomic<int64_t> frees{0};
  std::atomic<int64_t> refusals{0};

  // False where the limit has no room for the block, which is then not counted.
  bool on_allocate(int64_t num_bytes, int64_t limit) {
    int64_t before = current_bytes.load(std::memory_order_relaxed);
    do {
      if (before > limit - num_bytes) return false;
    } while (!current_bytes.compare_exchange_weak(before, before + num_bytes, std::memory_order_relaxed));
    allocations.fetch_add(1, std::memory_order_relaxed);
    raise_peak(before + num_bytes);
    return true;
  }

  void on_free(int64_t num_bytes) {
    frees.fetch_add(1, std::memory_order_relaxed);
    current_bytes.fetch_sub(num_bytes, std::memory_order_relaxed);
  }

  void raise_peak(int64_t now) {
    int64_t peak = peak_bytes.load();
    while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
    }
  }

  void reset_peak() {
    peak_bytes.exchange(current_bytes.load());
    raise_peak(current_bytes.load());  // another thread may have raised both in between
  }
};

Counters counters;

void counting_free(void* data) {
  counters.on_free(static_cast<int64_t>(malloc_usable_size(data)));
  c10::GetDefaultCPUAllocator()->raw_deleter()(data);
}

// PyTorch's own deleter under another name, by which is_pinned() knows the block.
void uncounted_free(void* data) { c10::GetDefaultCPUAllocator()->raw_deleter()(data); }

thread_local bool thread_is_uncounted = false;

constexpr uintptr_t HUGE_PAGE_BYTES = uintptr_t{1} << 21;

std::atomic<bool> huge_pages_wanted{false};

// The whole huge pages within a block. Where the kernel has none, small ones come as ever.
void want_huge_pages(void* data, size_t num_bytes) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + HUGE_PAGE_BYTES - 1) & ~(HUGE_PAGE_BYTES - 1);
  const uintptr_t last = (start + num_bytes) & ~(HUGE_PAGE_BYTES - 1);
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

[[noreturn]] void refuse(size_t num_bytes, int64_t limit) {
  counters.refusals.fetch_add(1, std::memory_order_relaxed);
  ACCEL_CHECK_MEMORY(false, "host memory: no room for ", num_bytes, " bytes: ",
                     counters.current_bytes.load(), " are in use, and the limit is ", limit);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    const bool counted = !thread_is_uncounted;
    const int64_t limit = counted ? counters.limit_bytes.load(std::memory_order_relaxed) : NO_LIMIT;
    // Asked before malloc too, which may fail where the limit says no in any case.
    if (limit != NO_LIMIT && num_bytes > 0 && !has_room(num_bytes, limit)) refuse(num_bytes, limit);
    c10::DataPtr block = c10::GetDefaultCPUAllocator()->allocate(num_bytes);
    void* data = block.get();
    if (data == nullptr) return block;  // 0 bytes
    if (counted && !counters.on_allocate(static_cast<int64_t>(malloc_usable_size(data)), limit)) {
      refuse(num_bytes, limit);
    }
    if (num_bytes >= HUGE_PAGE_BYTES && huge_pages_wanted.load(std::memory_order_relaxed)) {
      want_huge_pages(data, num_bytes);
    }
    block.release_context();
    return {data, data, counted ? &counting_free : &uncounted_free, block.device()};
  }

  // For raw_allocate(), which forgets the block's own deleter: not for a thread that is uncounted.
  c10::DeleterFnPtr raw_deleter() const override { return &counting_free; }

  void copy_data(void* dest, const void* src, std::size_t num_bytes) const override {
    default_copy_data(dest, src, num_bytes);
  }

 private:
  static bool has_room(size_t num_bytes, int64_t limit) {
    const int64_t room = limit - counters.current_bytes.load(std::memory_order_relaxed);
    return room > 0 && num_bytes <= static_cast<size_t>(room);
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

void lift_limit() { counters.limit_bytes.store(NO_LIMIT); }

// A forked process (a worker of a data loader) begins with the count of its parent, whose device it does
// not use: without a limit.
void install() {
  static const int registered = pthread_atfork(nullptr, nullptr, &lift_limit);
  ACCEL_CHECK(registered == 0, "host memory: pthread_atfork failed: ", registered);
  swap_allocator(c10::GetDefaultCPUAllocator(), &counting_allocator);
}

// The limit goes with the allocator: the next install() starts without one. Counters stay, since
// blocks do.
void uninstall() {
  swap_allocator(&counting_allocator, c10::GetDefaultCPUAllocator());
  lift_limit();
}

bool installed() { return c10::GetCPUAllocator() == &counting_allocator; }

// Current bytes never exceed `num_bytes` by an allocation from now on; 0 = no limit. What is
// allocated already stays, even where it is more.
void limit(int64_t num_bytes) {
  ACCEL_CHECK_VALUE(num_bytes >= 0, "host memory: a limit is 0 (none) or more, got ", num_bytes);
  ACCEL_CHECK(num_bytes == 0 || installed(),
              "host memory: a limit needs the counting allocator, which is not installed");
  counters.limit_bytes.store(num_bytes == 0 ? NO_LIMIT : num_bytes);
}

// Whether this thread's allocations are passed by, neither counted nor limited; returns what was
// before. A block stays what it was allocated as, whoever frees it.
bool uncounted(bool on) { return std::exchange(thread_is_uncounted, on); }

bool is_pinned(const at::Tensor& x) {
  if (!x.has_storage()) return false;
  // no_checks: a fake tensor's storage may be asked too.
  const c10::DataPtr& block = x.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return block.get_deleter() == &uncounted_free;
}

// Current bytes, peak bytes, allocations, frees, refusals, and the limit or 0.
std::vector<int64_t> stats() {
  const int64_t limit = counters.limit_bytes.load();
  // A peak that begins anew just now may not have been raised to what is held yet.
  const int64_t current = counters.current_bytes.load();
  return {current, std::max(counters.peak_bytes.load(), current), counters.allocations.load(),
          counters.frees.load(), counters.refusals.load(), limit == NO_LIMIT ? 0 : limit};
}

void reset_peak() { counters.reset_peak(); }

void huge_pages(bool on) { huge_pages_wanted.store(on); }

TORCH_LIBRARY_FRAGMENT(accel, m) {
  m.def("_host_memory_install() -> ()", &install);
  m.def("_host_memory_uninstall() -> ()", &uninstall);
  m.def("_host_memory_installed() -> bool", &installed);
  m.def("_host_memory_limit(int num_bytes) -> ()", &limit);
  m.def("_host_memory_uncounted(bool on) -> bool", &uncounted);
  m.def("_host_memory_is_pinned(Tensor x) -> bool", &is_pinned);
  m.def("_host_memory_stats() -> int[]", &stats);
  m.def("_host_memory_reset_peak() -> ()", &reset_peak);
  m.def("_host_memory_huge_pages(bool on) -> ()", &huge_pages);
}

// vmap's tensors have no storage of their own, and no other way to be asked.
TORCH_LIBRARY_IMPL(accel, FuncTorchBatched, m) { m.impl("_host_memory_is_pinned", &is_pinned); }

}  // namespace
}  // namespace accel
