// While it watches, every CPU tensor is allocated full of NaN, between two zones of NaN that are looked at
// when it is freed: what a kernel leaves unwritten or reads from beside a tensor shows in its results, and
// what it writes beside one is counted. As integers, these NaNs are large and positive.

#include <atomic>
#include <cstdlib>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

namespace accel::cuda {
namespace {

constexpr size_t kZone = 256;  // bytes
constexpr uint16_t kPoison = 0x7fff;  // again and again, a NaN in every floating dtype

std::atomic<int64_t> damaged{0};

struct Block {
  size_t num_bytes;
  unsigned char* data() { return reinterpret_cast<unsigned char*>(this) + 2 * kZone; }
};

void poison(unsigned char* memory, size_t num_bytes) {
  for (size_t i = 0; i < num_bytes; ++i) memory[i] = static_cast<unsigned char>(kPoison >> i % 2 * 8);
}

// A zone behind an odd number of bytes begins amid a word.
bool poisoned(const unsigned char* zone, size_t first = 0) {
  for (size_t i = 0; i < kZone; ++i) {
    if (zone[i] != static_cast<unsigned char>(kPoison >> (first + i) % 2 * 8)) return false;
  }
  return true;
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!poisoned(block->data() - kZone) || !poisoned(block->data() + block->num_bytes, block->num_bytes)) {
    ++damaged;
  }
  std::free(block);
}

struct GuardedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* memory = std::aligned_alloc(kZone, (num_bytes + 4 * kZone - 1) / kZone * kZone);
    TORCH_CHECK(memory, "guarded memory: no ", num_bytes, " bytes");
    auto* block = static_cast<Block*>(memory);
    block->num_bytes = num_bytes;
    poison(block->data() - kZone, num_bytes + 2 * kZone);
    return {block->data(), block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
};

GuardedAllocator guarded;
c10::Allocator* usual = nullptr;

void watch(bool on) {
  if (on == (usual != nullptr)) return;
  if (on) {
    usual = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&guarded);
  } else {
    c10::SetCPUAllocator(usual);
    usual = nullptr;
  }
}

TORCH_LIBRARY_FRAGMENT(accel_emulated, m) {
  m.def("_watch_memory(bool on) -> ()", &watch);
  // How many blocks had something written beside them, of those that were freed since the last call.
  m.def("_damaged_blocks() -> int", [] { return damaged.exchange(0); });
}

}  // namespace
}  // namespace accel::cuda
