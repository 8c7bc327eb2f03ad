// What the copy engine of sm_90 and later does for a kernel: it brings memory into shared memory while no
// thread waits, and counts the bytes where threads then look; between the blocks of a cluster too. Kernels of
// this kind are launched only where has_bulk_copies(); in code for less their bodies are left out by
// ACCEL_BULK_COPIES.
#pragma once

#include "accel/cuda/device.h"

namespace accel::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define ACCEL_BULK_COPIES 0
#else
#define ACCEL_BULK_COPIES 1
#endif

constexpr int kMostSharedBytes = 227 << 10;  // of a block of sm_90 and sm_100, by asking

// Whether the current device has them, with so much shared memory for what they bring, and runs code that was
// compiled for them, not for an older one.
bool has_bulk_copies();

#ifdef __CUDACC__
ACCEL_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The address of the same variable in another block of the cluster.
ACCEL_DEVICE uint32_t address_in_block(uint32_t address, int block_of_cluster) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block_of_cluster));
  return there;
}
#endif

// Bytes that are on their way into shared memory. A phase ends when one thread has said how many there are to
// be and all of them are there; the next begins with it. Phases are 0, 1, 0, 1, ...
class Arrivals {
 public:
  // By one thread; others may use it after a barrier.
  ACCEL_DEVICE void begin() {
#ifdef __CUDACC__
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&state_)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
    emulator::begin_arrivals(&state_);
#endif
  }

  // By one thread, once in a phase.
  ACCEL_DEVICE void expect(uint32_t num_bytes) {
#ifdef __CUDACC__
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state_)),
                   "r"(num_bytes)
                   : "memory");
#else
    emulator::expect_bytes(&state_, num_bytes);
#endif
  }

  // Until this phase has ended.
  ACCEL_DEVICE void wait(int phase) {
#ifdef __CUDACC__
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra again;\n"
        "}" ::"r"(shared_address(&state_)),
        "r"(phase)
        : "memory");
#else
    emulator::wait_for_bytes(&state_, phase);
#endif
  }

  // Has the copy engine bring so many bytes, a multiple of 16 between addresses that are.
  ACCEL_DEVICE void copy(void* to_shared, const void* from, uint32_t num_bytes) {
#ifdef __CUDACC__
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to_shared)),
        "l"(from), "r"(num_bytes), "r"(shared_address(&state_))
        : "memory");
#else
    emulator::bulk_copy(to_shared, from, num_bytes, &state_);
#endif
  }

  // Writes 4 bytes where `slot` is in another block of the cluster, or in this one; that block waits for
  // them.
  ACCEL_DEVICE void send(float value, float* slot, int block_of_cluster) {
#ifdef __CUDACC__
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
            address_in_block(shared_address(slot), block_of_cluster)),
        "r"(bits_as<uint32_t>(value)), "r"(address_in_block(shared_address(&state_), block_of_cluster))
        : "memory");
#else
    emulator::send(value, slot, &state_, block_of_cluster);
#endif
  }

 private:
  alignas(8) uint64_t state_;
};

// Of all threads of the blocks of a cluster.
ACCEL_DEVICE void cluster_barrier() {
#ifdef __CUDACC__
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  emulator::cluster_barrier();
#endif
}

// What a block gets beyond its variables: as many bytes as its launch names.
ACCEL_DEVICE unsigned char* launched_shared() {
#ifdef __CUDACC__
  extern __shared__ __align__(128) unsigned char storage[];
  return storage;
#else
  return emulator::launched_shared();
#endif
}

struct Blocks {
  unsigned threads;
  unsigned shared_bytes;  // launched_shared()
  unsigned per_cluster;
};

// Launches clusters of such blocks.
template <typename Args>
void launch_clusters(void (*kernel)(Args), unsigned num_clusters, Blocks blocks, Queue queue,
                     const Args& args) {
  if (num_clusters == 0) return;
  const unsigned num_blocks = num_clusters * blocks.per_cluster;
#ifdef __CUDACC__
  const auto shared_bytes = static_cast<int>(blocks.shared_bytes);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks.per_cluster;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = num_blocks;
  config.blockDim = blocks.threads;
  config.dynamicSmemBytes = blocks.shared_bytes;
  config.stream = queue.stream;
  config.attrs = &cluster;
  config.numAttrs = blocks.per_cluster > 1 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, args);
#else
  emulator::run(num_blocks, blocks.threads, [&] { kernel(args); }, blocks.shared_bytes, blocks.per_cluster);
#endif
}

}  // namespace accel::cuda
