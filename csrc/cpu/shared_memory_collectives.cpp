// Collectives among the processes of one host, through memory that they share. How the memory comes about
// and what is promised to callers: accel/device/cpu/shared_memory.py.
//
// Every operation is cut into steps, the same number on every rank. In a step each rank posts up to one
// slot of its own data, then takes what it needs from the slots of the others. Two counters for each rank
// order that: `posted`, steps whose data lie in its slots, and `taken`, steps that it will not read again.
// Step t lies in slot t % kSlots of each rank, so it may be posted once everybody has taken t - kSlots.
// An asynchronous operation whose steps all find free slots is posted within the call and taken when it is
// waited for, or before the next one; any other is moved by a thread of the group. Nothing blocks a caller
// that asked not to be blocked.
//
//   page 0     proof: nonces that the ranks write before they trust the memory (in Python)
//   counters   for each rank, a cache line each
//   slots      for each rank, kSlots of kSlotBytes

#ifndef ACCEL_ISA  // the first time through this file
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "accel/check.h"
#include "accel/dtype.h"

#define ACCEL_KERNEL_FILE "cpu/shared_memory_collectives.cpp"
#include "accel/for_each_isa.h"
#endif

namespace accel::ACCEL_ISA {

// The sum over ranks, in their order, in fp32, rounded once; over `divisor` where that is not 1.
template <typename T>
void sum_ranks(const void* const* operands, int num_ranks, void* out, int64_t count, float divisor) {
  const auto first = static_cast<const T*>(operands[0]);
  for_each_pair(count, [&](int64_t i, auto span) {
    Pair total = load(first + i, span);
    for (int rank = 1; rank < num_ranks; ++rank) {
      const Pair term = load(static_cast<const T*>(operands[rank]) + i, span);
      total.v[0] += term.v[0];
      total.v[1] += term.v[1];
    }
    if (divisor != 1.0f) {
      total.v[0] /= divisor;
      total.v[1] /= divisor;
    }
    store<false>(static_cast<T*>(out) + i, total, span);
  });
}

}  // namespace accel::ACCEL_ISA

#if ACCEL_ISA_IS_LAST
namespace accel {
namespace {

using at::Tensor;
using at::TensorList;
using Clock = std::chrono::steady_clock;

constexpr int64_t kPage = 4096;
constexpr uint32_t kSlots = 4;
constexpr int64_t kSlotBytes = 512 << 10;  // 4 of them: 2 MiB for each rank
constexpr int64_t kLine = 64;
// An all-reduce of up to so many bytes sends everything to everybody, one wait in place of two.
constexpr int64_t kGatheredBytes = 32 << 10;
constexpr auto kLivenessInterval = std::chrono::milliseconds(200);

// ---- reductions

enum class Reduction : int64_t { sum, average, product, min, max };  // accel/device/cpu/shared_memory.py

using Reduce = void (*)(const void* const*, int, void*, int64_t, float);

template <Reduction kReduction, typename T>
T combined(T a, T b) {
  if constexpr (kReduction == Reduction::min) return a != a || a < b ? a : b;  // NaN stays
  if constexpr (kReduction == Reduction::max) return a != a || a > b ? a : b;
  if constexpr (std::is_integral_v<T>) {  // wraps around
    using Bits = std::make_unsigned_t<T>;
    if constexpr (kReduction == Reduction::product) return static_cast<T>(Bits(a) * Bits(b));
    return static_cast<T>(Bits(a) + Bits(b));
  } else {
    return kReduction == Reduction::product ? a * b : a + b;
  }
}

// In the order of ranks, 16-bit floats in fp32 and rounded once.
template <Reduction kReduction, typename T>
void reduce_ranks(const void* const* operands, int num_ranks, void* out, int64_t count, float divisor) {
  using Wide = std::conditional_t<sizeof(T) == 2, float, T>;
  constexpr int64_t kBlock = 256;
  Wide total[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    for (int rank = 0; rank < num_ranks; ++rank) {
      const T* x = static_cast<const T*>(operands[rank]) + begin;
      for (int64_t i = 0; i < size; ++i) {
        const Wide term = static_cast<Wide>(x[i]);
        total[i] = rank == 0 ? term : combined<kReduction>(total[i], term);
      }
    }
    T* to = static_cast<T*>(out) + begin;
    for (int64_t i = 0; i < size; ++i) {
      if constexpr (std::is_floating_point_v<Wide>) {
        to[i] = static_cast<T>(divisor == 1.0f ? total[i] : total[i] / static_cast<Wide>(divisor));
      } else {
        to[i] = total[i];
      }
    }
  }
}

template <typename T>
Reduce reduction_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::product: return &reduce_ranks<Reduction::product, T>;
    case Reduction::min: return &reduce_ranks<Reduction::min, T>;
    case Reduction::max: return &reduce_ranks<Reduction::max, T>;
    default: return &reduce_ranks<Reduction::sum, T>;
  }
}

Reduce reduction_of(at::ScalarType dtype, Reduction reduction) {
  const bool sums = reduction == Reduction::sum || reduction == Reduction::average;
  if (sums && (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf)) {
    return float_kernel(dtype, "shared-memory collectives",
                        []<typename T> { return ACCEL_FOR_THIS_CPU(sum_ranks<T>); });
  }
  ACCEL_CHECK_VALUE(reduction != Reduction::average || at::isFloatingType(dtype),
                    "shared-memory collectives: the average of ", dtype, " is not defined");
  switch (dtype) {
    case at::kFloat: return reduction_of<float>(reduction);
    case at::kDouble: return reduction_of<double>(reduction);
    case at::kBFloat16: return reduction_of<at::BFloat16>(reduction);
    case at::kHalf: return reduction_of<at::Half>(reduction);
    case at::kChar: return reduction_of<int8_t>(reduction);
    case at::kByte: return reduction_of<uint8_t>(reduction);
    case at::kInt: return reduction_of<int32_t>(reduction);
    case at::kLong: return reduction_of<int64_t>(reduction);
    default: ACCEL_CHECK_VALUE(false, "shared-memory collectives: no reduction of ", dtype);
  }
}

// ---- the segment

struct alignas(kLine) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint64_t> marks[kSlots];  // of `posted`: the Operation::mark of what lies in each slot
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

struct Counters {
  Counter posted;
  Counter taken;
};

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t counters_bytes(int64_t num_ranks) {
  return round_up(num_ranks * static_cast<int64_t>(sizeof(Counters)), kPage);
}

int64_t segment_bytes(int64_t num_ranks) {
  return kPage + counters_bytes(num_ranks) + num_ranks * kSlots * kSlotBytes;
}

class Segment {
 public:
  Segment(int fd, int num_ranks) : num_ranks_(num_ranks), size_(segment_bytes(num_ranks)) {
    struct stat status = {};
    ACCEL_CHECK(fstat(fd, &status) == 0 && status.st_size == size_,
                "shared-memory collectives: the segment must have ", size_, " bytes, has ", status.st_size);
    void* start = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ACCEL_CHECK(start != MAP_FAILED, "shared-memory collectives: mmap: ", std::strerror(errno));
    start_ = static_cast<char*>(start);
    madvise(start_, size_, MADV_DONTFORK);  // a forked data loader must not keep it
  }
  ~Segment() { munmap(start_, size_); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Counters& counters(int rank) const { return reinterpret_cast<Counters*>(start_ + kPage)[rank]; }
  char* slot(int rank, uint32_t step) const {
    const int64_t number = rank * static_cast<int64_t>(kSlots) + step % kSlots;
    return start_ + kPage + counters_bytes(num_ranks_) + number * kSlotBytes;
  }

 private:
  int num_ranks_;
  int64_t size_;
  char* start_;
};

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

void publish(Counter& counter, uint32_t value) {
  counter.value.store(value, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) {
    futex(&counter.value, FUTEX_WAKE, INT32_MAX, nullptr);
  }
}

// Counters wrap around; they are never further apart than kSlots.
bool reached(const Counter& counter, uint32_t target) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - target) >= 0;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// ---- operations

int64_t steps_for(int64_t total, int64_t size) { return (total + size - 1) / size; }

enum class Kind : uint64_t { barrier, broadcast, all_gather, reduce_scatter, all_reduce };
constexpr int kSizeBits = 56;  // of a mark: the size in bytes below, the kind above

const char* name_of(uint64_t mark) {
  constexpr const char* kNames[] = {"barrier", "broadcast", "all_gather", "reduce_scatter", "all_reduce"};
  return kNames[mark >> kSizeBits];
}

// One collective of this rank. Its tensors may be changed by the caller meanwhile only as NCCL allows, and
// may be released: an operation holds storages.
class Operation {
 public:
  // `num_bytes` is the same on every rank: of the whole tensor, or of the largest shard; a barrier's is 1.
  Operation(Kind kind, int64_t num_bytes, int64_t step_bytes, int64_t steps_each = 1)
      : mark(static_cast<uint64_t>(kind) << kSizeBits | static_cast<uint64_t>(num_bytes)),
        num_bytes(num_bytes),
        num_steps(steps_each * steps_for(num_bytes, step_bytes)) {}
  virtual ~Operation() = default;

  virtual void post(int64_t step, char* slot) {}
  // What needs nobody else: done after post(), while the others catch up.
  virtual void meanwhile(int64_t step) {}
  // `slots` holds the slot of each rank.
  virtual void take(int64_t step, const std::vector<const char*>& slots) {}
  virtual bool may_post(int64_t step) const { return true; }
  virtual bool reads(int peer) const { return true; }
  // After the last step.
  virtual void finish() {}

  const uint64_t mark;
  const int64_t num_bytes;
  const int64_t num_steps;
  int64_t posted = 0;
  int64_t taken = 0;
};

// Dense memory that an operation reads.
class Source {
 public:
  explicit Source(const Tensor& tensor) {
    const Tensor dense = (tensor.is_neg() ? tensor.resolve_neg() : tensor).contiguous();
    storage_ = dense.storage();
    data_ = static_cast<const char*>(dense.const_data_ptr());
  }
  const char* data() const { return data_; }

 private:
  c10::Storage storage_;
  const char* data_;
};

// Dense memory that an operation writes: the tensor's own, or a copy that finish() brings home.
class Target {
 public:
  enum class Filled { no, yes, only_read };

  Target(const Tensor& tensor, Filled filled) {
    const bool is_written = filled != Filled::only_read;
    ACCEL_CHECK_VALUE(!tensor.is_neg(), "shared-memory collectives: the output is a lazily negated view");
    ACCEL_CHECK_VALUE(
        !is_written || at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
        "shared-memory collectives: elements of the output share memory, its strides are ", tensor.strides());
    if (is_written && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    Tensor dense = tensor;
    if (!tensor.is_contiguous()) {
      home_ = tensor.detach();
      dense_ = dense = filled != Filled::no ? tensor.contiguous() : at::empty(tensor.sizes(), tensor.options());
    }
    storage_ = dense.storage();
    data_ = static_cast<char*>(dense.mutable_data_ptr());
  }
  char* data() const { return data_; }
  void finish() {
    if (home_.defined()) home_.copy_(dense_);
  }

 private:
  Tensor home_, dense_;
  c10::Storage storage_;
  char* data_;
};

void copy(char* to, const char* from, int64_t num_bytes) {
  if (num_bytes > 0 && to != from) std::memcpy(to, from, num_bytes);
}

// The part of `total` that step number `step` of `size` each covers.
int64_t part(int64_t total, int64_t step, int64_t size) {
  return std::clamp<int64_t>(total - step * size, 0, size);
}

class Barrier final : public Operation {
 public:
  Barrier() : Operation(Kind::barrier, 1, 1) {}
};

class Broadcast final : public Operation {
 public:
  Broadcast(const Tensor& tensor, int rank, int root)
      : Operation(Kind::broadcast, tensor.nbytes(), kSlotBytes),
        rank_(rank),
        root_(root),
        tensor_(tensor, rank == root ? Target::Filled::only_read : Target::Filled::no) {}

  void post(int64_t step, char* slot) override {
    if (rank_ == root_) copy(slot, tensor_.data() + step * kSlotBytes, part(num_bytes, step, kSlotBytes));
  }
  void take(int64_t step, const std::vector<const char*>& slots) override {
    if (rank_ == root_) return;
    copy(tensor_.data() + step * kSlotBytes, slots[root_], part(num_bytes, step, kSlotBytes));
  }
  bool reads(int peer) const override { return rank_ != root_ && peer == root_; }
  void finish() override {
    if (rank_ != root_) tensor_.finish();
  }

 private:
  int rank_, root_;
  Target tensor_;
};

// Shards of one tensor, or tensors of a list, one for each rank and maybe of different sizes.
int64_t shard_elements(TensorList shards, int64_t rank, int64_t num_ranks) {
  return shards.size() == 1 ? shards[0].numel() / num_ranks : shards[rank].numel();
}

template <typename Memory>
std::vector<char*> shard_pointers(const std::vector<Memory>& memory, TensorList shards, int64_t num_ranks) {
  std::vector<char*> pointers;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    pointers.push_back(
        memory.size() == 1
            ? const_cast<char*>(memory[0].data()) + rank * (shards[0].nbytes() / num_ranks)
            : const_cast<char*>(memory[rank].data()));
  }
  return pointers;
}

void check_shards(const char* op, TensorList shards, int64_t num_ranks, const Tensor& own, int64_t rank) {
  ACCEL_CHECK_VALUE(
      static_cast<int64_t>(shards.size()) == num_ranks ||
          (shards.size() == 1 && shards[0].numel() % num_ranks == 0),
      op, ": needs one tensor, a multiple of ", num_ranks, " elements, or one for each of ", num_ranks,
      " ranks, got ", shards.size(), " and the first with ", shards.empty() ? 0 : shards[0].numel());
  for (const Tensor& shard : shards) {
    ACCEL_CHECK_VALUE(shard.scalar_type() == own.scalar_type(), op, ": needs one dtype, got ",
                      own.scalar_type(), " and ", shard.scalar_type());
  }
  ACCEL_CHECK_VALUE(own.numel() == shard_elements(shards, rank, num_ranks), op, ": rank ", rank,
                    " has a tensor of ", own.numel(), " elements where its shard has ",
                    shard_elements(shards, rank, num_ranks));
}

int64_t largest_shard(TensorList shards, int64_t num_ranks) {
  int64_t largest = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    largest = std::max(largest, shard_elements(shards, rank, num_ranks));
  }
  return largest;
}

class AllGather final : public Operation {
 public:
  AllGather(const Tensor& input, TensorList outputs, int rank, int num_ranks)
      : Operation(Kind::all_gather, largest_shard(outputs, num_ranks) * input.element_size(), kSlotBytes),
        rank_(rank),
        input_(input) {
    for (const Tensor& output : outputs) outputs_.emplace_back(output, Target::Filled::no);
    pointers_ = shard_pointers(outputs_, outputs, num_ranks);
    for (int64_t peer = 0; peer < num_ranks; ++peer) {
      num_bytes_.push_back(shard_elements(outputs, peer, num_ranks) * input.element_size());
    }
  }

  void post(int64_t step, char* slot) override {
    copy(slot, input_.data() + step * kSlotBytes, part(num_bytes_[rank_], step, kSlotBytes));
  }
  void meanwhile(int64_t step) override {
    copy(pointers_[rank_] + step * kSlotBytes, input_.data() + step * kSlotBytes,
         part(num_bytes_[rank_], step, kSlotBytes));
  }
  void take(int64_t step, const std::vector<const char*>& slots) override {
    const int num_ranks = static_cast<int>(slots.size());
    for (int turn = 1; turn < num_ranks; ++turn) {  // not all from the same one at a time
      const int peer = (rank_ + turn) % num_ranks;
      copy(pointers_[peer] + step * kSlotBytes, slots[peer], part(num_bytes_[peer], step, kSlotBytes));
    }
  }
  void finish() override {
    for (Target& output : outputs_) output.finish();
  }

 private:
  int rank_;
  Source input_;
  std::vector<Target> outputs_;
  std::vector<char*> pointers_;
  std::vector<int64_t> num_bytes_;
};

// How operands become one, for one dtype and group.
struct Reducer {
  Reducer(const Tensor& tensor, int64_t reduction, int rank, int num_ranks)
      : function(reduction_of(tensor.scalar_type(), static_cast<Reduction>(reduction))),
        divisor(static_cast<Reduction>(reduction) == Reduction::average ? num_ranks : 1.0f),
        item_size(tensor.element_size()),
        rank(rank),
        operands(num_ranks) {}

  // Reduces `count` elements at `offset` bytes of every slot; our own lie at `own`.
  void operator()(
      const std::vector<const char*>& slots, int64_t offset, const char* own, char* out, int64_t count) {
    for (size_t peer = 0; peer < slots.size(); ++peer) operands[peer] = slots[peer] + offset;
    operands[rank] = own;
    if (count > 0) function(operands.data(), static_cast<int>(operands.size()), out, count, divisor);
  }

  Reduce function;
  float divisor;
  int64_t item_size;
  int rank;
  std::vector<const void*> operands;
};

class ReduceScatter final : public Operation {
 public:
  ReduceScatter(const Tensor& output, TensorList inputs, int64_t reduction, int rank, int num_ranks)
      : Operation(Kind::reduce_scatter, largest_shard(inputs, num_ranks) * output.element_size(),
                  piece_bytes(num_ranks)),
        piece_bytes_(piece_bytes(num_ranks)),
        reduce_(output, reduction, rank, num_ranks),
        output_(output, Target::Filled::no) {
    for (const Tensor& input : inputs) inputs_.emplace_back(input);
    pointers_ = shard_pointers(inputs_, inputs, num_ranks);
    for (int64_t peer = 0; peer < num_ranks; ++peer) {
      num_bytes_.push_back(shard_elements(inputs, peer, num_ranks) * output.element_size());
    }
  }

  void post(int64_t step, char* slot) override {
    for (size_t peer = 0; peer < pointers_.size(); ++peer) {
      if (static_cast<int>(peer) == reduce_.rank) continue;
      copy(slot + peer * piece_bytes_, pointers_[peer] + step * piece_bytes_,
           part(num_bytes_[peer], step, piece_bytes_));
    }
  }
  void take(int64_t step, const std::vector<const char*>& slots) override {
    const int64_t start = step * piece_bytes_;
    reduce_(slots, reduce_.rank * piece_bytes_, pointers_[reduce_.rank] + start, output_.data() + start,
            part(num_bytes_[reduce_.rank], step, piece_bytes_) / reduce_.item_size);
  }
  void finish() override { output_.finish(); }

 private:
  static int64_t piece_bytes(int num_ranks) { return kSlotBytes / num_ranks / kLine * kLine; }

  int64_t piece_bytes_;
  Reducer reduce_;
  Target output_;
  std::vector<Source> inputs_;
  std::vector<char*> pointers_;
  std::vector<int64_t> num_bytes_;
};

// Everybody sends everything to everybody and reduces it all.
class AllReduceGathered final : public Operation {
 public:
  AllReduceGathered(const Tensor& tensor, int64_t reduction, int rank, int num_ranks)
      : Operation(Kind::all_reduce, tensor.nbytes(), kSlotBytes),
        reduce_(tensor, reduction, rank, num_ranks),
        tensor_(tensor, Target::Filled::yes) {}

  void post(int64_t step, char* slot) override {
    copy(slot, tensor_.data() + step * kSlotBytes, part(num_bytes, step, kSlotBytes));
  }
  void take(int64_t step, const std::vector<const char*>& slots) override {
    char* own = tensor_.data() + step * kSlotBytes;
    reduce_(slots, 0, own, own, part(num_bytes, step, kSlotBytes) / reduce_.item_size);
  }
  void finish() override { tensor_.finish(); }

 private:
  Reducer reduce_;
  Target tensor_;
};

// Each rank reduces a slice of each chunk (even steps), then gathers the slices of the others (odd ones).
class AllReduceSliced final : public Operation {
 public:
  AllReduceSliced(const Tensor& tensor, int64_t reduction, int rank, int num_ranks)
      : Operation(Kind::all_reduce, tensor.nbytes(), kSlotBytes, 2),
        reduce_(tensor, reduction, rank, num_ranks),
        tensor_(tensor, Target::Filled::yes) {}

  bool may_post(int64_t step) const override { return step % 2 == 0 || taken >= step; }
  void post(int64_t step, char* slot) override {
    for_each_slice(step, [&](int peer, int64_t begin, int64_t size, char* chunk) {
      if ((peer == reduce_.rank) == (step % 2 == 1)) copy(slot + begin, chunk + begin, size);
    });
  }
  void take(int64_t step, const std::vector<const char*>& slots) override {
    for_each_slice(step, [&](int peer, int64_t begin, int64_t size, char* chunk) {
      if (step % 2 == 1 && peer != reduce_.rank) copy(chunk + begin, slots[peer] + begin, size);
      if (step % 2 == 0 && peer == reduce_.rank) {
        reduce_(slots, begin, chunk + begin, chunk + begin, size / reduce_.item_size);
      }
    });
  }
  void finish() override { tensor_.finish(); }

 private:
  template <typename F>
  void for_each_slice(int64_t step, F f) {
    const int num_ranks = static_cast<int>(reduce_.operands.size());
    const int64_t chunk_bytes = part(num_bytes, step / 2, kSlotBytes);
    const int64_t slice = round_up(steps_for(chunk_bytes, num_ranks), kLine);
    for (int peer = 0; peer < num_ranks; ++peer) {
      f(peer, peer * slice, part(chunk_bytes, peer, slice), tensor_.data() + step / 2 * kSlotBytes);
    }
  }

  Reducer reduce_;
  Target tensor_;
};

// ---- a group

class Group : public std::enable_shared_from_this<Group> {
 public:
  struct Options {
    int rank;
    std::vector<int64_t> pids;
    std::string name;
    std::chrono::microseconds spin;
  };

  Group(int fd, Options options, std::chrono::milliseconds timeout)
      : rank_(options.rank),
        num_ranks_(static_cast<int>(options.pids.size())),
        options_(std::move(options)),
        segment_(fd, num_ranks_),
        timeout_(timeout),
        slots_(num_ranks_) {
    for (const int64_t pid : options_.pids) {
      pidfds_.push_back(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
    }
  }
  ~Group() {
    for (const int fd : pidfds_) {
      if (fd >= 0) close(fd);
    }
  }

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }

  // The operation's ticket, for wait(); 0 where it is over.
  int64_t submit(std::unique_ptr<Operation> operation, bool async_op) {
    int64_t ticket;
    bool driven;
    {
      const std::lock_guard lock(queue_mutex_);
      queue_.push_back(std::move(operation));
      ticket = ++num_submitted_;
      driven = std::exchange(is_driven_, async_op || is_driven_);
    }
    if (!async_op) {
      wait(ticket);
      return 0;
    }
    bool all_posted = false;
    if (!driven) {
      const Driving driving(*this);
      all_posted = post_ahead();
    }
    if (!all_posted) wake_worker();
    return ticket;
  }

  // Returns when the operation and all before it are over, whoever drives those behind it. Throws once one has
  // failed.
  void wait(int64_t ticket) {
    if (done(ticket)) return;
    {
      std::unique_lock lock(queue_mutex_);
      moved_.wait(lock, [&] { return done(ticket) || !is_driven_; });
      if (done(ticket)) return;
      is_driven_ = true;
    }
    const Driving driving(*this);
    ACCEL_CHECK(failure_.empty(), failure_);
    spin_ = options_.spin;
    while (!done(ticket)) finish_first();
  }

  bool done(int64_t ticket) const { return num_done_.load(std::memory_order_acquire) >= ticket; }

  // As done(), for those who ask until it is: somebody gets on with it meanwhile. What has failed is over too.
  bool poll_done(int64_t ticket) {
    if (done(ticket)) return true;
    {
      const std::lock_guard lock(queue_mutex_);
      if (!is_driven_ && !failure_.empty()) return true;
    }
    wake_worker();
    return false;
  }

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  void leave() {
    const std::lock_guard lock(queue_mutex_);
    left_ = true;
    work_.notify_one();
  }

 private:
  // Whoever has set is_driven_ moves data, alone, until this goes.
  class Driving {
   public:
    explicit Driving(Group& group) : group_(group) {}
    ~Driving() {
      const std::lock_guard lock(group_.queue_mutex_);
      group_.is_driven_ = false;
      group_.moved_.notify_all();
    }
    Driving(const Driving&) = delete;
    Driving& operator=(const Driving&) = delete;

   private:
    Group& group_;
  };

  Operation* first() {
    const std::lock_guard lock(queue_mutex_);
    return queue_.empty() ? nullptr : queue_.front().get();
  }

  // The first operation in the queue that has steps left to post.
  Operation* first_unposted() {
    const std::lock_guard lock(queue_mutex_);
    for (const auto& operation : queue_) {
      if (operation->posted < operation->num_steps) return operation.get();
    }
    return nullptr;
  }

  // Driving, as all below. Posts what finds free slots; whether that was all there is.
  bool post_ahead() {
    while (Operation* operation = first_unposted()) {
      if (!operation->may_post(operation->posted) || !slot_is_free()) return false;
      operation->post(operation->posted, segment_.slot(rank_, posted_));
      mark_of(rank_, posted_).store(operation->mark, std::memory_order_relaxed);
      publish(segment_.counters(rank_).posted, ++posted_);
      operation->meanwhile(operation->posted++);
    }
    return true;
  }

  bool slot_is_free() const {
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (!reached(segment_.counters(peer).taken, posted_ - kSlots + 1)) return false;
    }
    return true;
  }

  void finish_first() {
    Operation& operation = *first();
    while (operation.taken < operation.num_steps) {
      post_ahead();
      if (operation.posted == operation.taken) {
        for (int peer = 0; peer < num_ranks_; ++peer) {
          await(segment_.counters(peer).taken, posted_ - kSlots + 1, peer, operation, "to take its part of");
        }
        continue;
      }
      for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer != rank_ && operation.reads(peer)) {
          await(segment_.counters(peer).posted, taken_ + 1, peer, operation, "to bring its part of");
          check_same(peer, operation);
        }
        slots_[peer] = segment_.slot(peer, taken_);
      }
      operation.take(operation.taken++, slots_);
      publish(segment_.counters(rank_).taken, ++taken_);
    }
    operation.finish();
    const std::lock_guard lock(queue_mutex_);
    queue_.pop_front();
    num_done_.fetch_add(1, std::memory_order_release);
    moved_.notify_all();
  }

  std::atomic<uint64_t>& mark_of(int peer, uint32_t step) const {
    return segment_.counters(peer).posted.marks[step % kSlots];
  }

  void check_same(int peer, const Operation& operation) {
    const uint64_t theirs = mark_of(peer, taken_).load(std::memory_order_relaxed);
    if (theirs == operation.mark) return;
    failure_ = c10::str(
        "shared-memory collectives: rank ", rank_, " of group ", options_.name, " is at ",
        name_of(operation.mark), " of ", operation.num_bytes, " bytes, operation ", num_done_.load() + 1,
        " of this group, but rank ", peer, " (process ", options_.pids[peer], ") at ", name_of(theirs), " of ",
        theirs & ((uint64_t{1} << kSizeBits) - 1), " bytes: all ranks must call the same collectives in one order");
    ACCEL_CHECK(false, failure_);
  }

  void await(Counter& counter, uint32_t target, int peer, const Operation& operation, const char* what) {
    if (reached(counter, target)) return;
    const auto start = Clock::now();
    for (auto until = start + spin_; Clock::now() < until;) {
      for (int i = 0; i < 32; ++i) {
        if (reached(counter, target)) return;
        relax();
      }
    }
    while (!reached(counter, target)) {
      sleep_on(counter, target);
      if (reached(counter, target)) return;
      const auto waited = Clock::now() - start;
      const bool is_late = waited >= timeout_.load();
      if ((is_late || is_dead(peer)) && !reached(counter, target)) {
        fail(peer, operation, what, waited, is_late);
      }
    }
  }

  // Until the counter moves, or long enough to look after its owner.
  void sleep_on(Counter& counter, uint32_t target) {
    const auto nanoseconds = std::chrono::nanoseconds(kLivenessInterval).count();
    const timespec interval = {0, static_cast<long>(nanoseconds)};
    counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = counter.value.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - target) < 0) futex(&counter.value, FUTEX_WAIT, seen, &interval);
    counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }

  bool is_dead(int peer) const {
    pollfd status = {pidfds_[peer], POLLIN, 0};
    return pidfds_[peer] >= 0 && poll(&status, 1, 0) == 1;
  }

  [[noreturn]] void fail(
      int peer, const Operation& operation, const char* what, Clock::duration waited, bool is_late) {
    const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(waited).count();
    failure_ = c10::str(
        "shared-memory collectives: rank ", rank_, " of group ", options_.name, " waited ",
        static_cast<double>(milliseconds) / 1e3, " s for rank ", peer, " (process ", options_.pids[peer], ") ",
        what, " ", name_of(operation.mark), ", operation ", num_done_.load() + 1, " of this group: ",
        is_late ? "the group's time-out is over" : "that process has ended");
    ACCEL_CHECK(false, failure_);
  }

  void wake_worker() {
    const std::lock_guard lock(queue_mutex_);
    has_work_ = true;
    if (!worker_runs_) {
      worker_runs_ = true;
      std::thread([group = shared_from_this()] { group->work(); }).detach();
    }
    work_.notify_one();
  }

  void work() {
    const at::NoGradGuard no_grad;
    while (true) {
      {
        std::unique_lock lock(queue_mutex_);
        work_.wait(lock, [&] { return has_work_ || left_; });
        if (left_) return;
        has_work_ = false;
        moved_.wait(lock, [&] { return !is_driven_; });
        is_driven_ = true;
      }
      const Driving driving(*this);
      spin_ = {};  // it shares the cores with those who compute
      try {
        while (failure_.empty() && first() != nullptr) finish_first();
      } catch (const std::exception& error) {  // wait() throws it where somebody listens
        if (failure_.empty()) failure_ = error.what();
      }
    }
  }

  const int rank_;
  const int num_ranks_;
  const Options options_;
  const Segment segment_;
  std::vector<int> pidfds_;
  std::atomic<std::chrono::milliseconds> timeout_;

  std::mutex queue_mutex_;
  std::condition_variable work_;
  std::condition_variable moved_;  // an operation is over, or nobody drives any more
  bool is_driven_ = false;
  std::deque<std::unique_ptr<Operation>> queue_;
  int64_t num_submitted_ = 0;
  bool has_work_ = false, worker_runs_ = false, left_ = false;
  std::atomic<int64_t> num_done_ = 0;

  // of whoever drives
  std::string failure_;
  uint32_t posted_ = 0, taken_ = 0;  // steps of all operations so far
  std::chrono::microseconds spin_{};
  std::vector<const char*> slots_;
};

// ---- what Python calls

struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<Group>> groups;
  int64_t last = 0;
};

Registry& registry() {
  static auto* const kept = new Registry;  // never destroyed: threads may outlive main()
  return *kept;
}

std::shared_ptr<Group> group_of(int64_t handle) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().groups.find(handle);
  ACCEL_CHECK_VALUE(found != registry().groups.end(), "shared-memory collectives: no group ", handle);
  return found->second;
}

int64_t open_group(
    int64_t fd, int64_t rank, at::IntArrayRef pids, std::string name, int64_t timeout_ms, int64_t spin_us) {
  auto group = std::make_shared<Group>(
      static_cast<int>(fd),
      Group::Options{static_cast<int>(rank), pids.vec(), std::move(name), std::chrono::microseconds(spin_us)},
      std::chrono::milliseconds(timeout_ms));
  const std::lock_guard lock(registry().mutex);
  registry().groups[++registry().last] = std::move(group);
  return registry().last;
}

void close_group(int64_t handle) {
  group_of(handle)->leave();
  const std::lock_guard lock(registry().mutex);
  registry().groups.erase(handle);
}

template <typename Op, typename... Args>
int64_t submit(Group& group, bool async_op, Args&&... args) {
  const at::AutoDispatchBelowADInplaceOrView outside_autograd;
  return group.submit(std::make_unique<Op>(std::forward<Args>(args)...), async_op);
}

int64_t all_reduce(int64_t handle, const Tensor& tensor, int64_t reduction, bool async_op) {
  const auto group = group_of(handle);
  const bool gathered = group->num_ranks() == 2 || static_cast<int64_t>(tensor.nbytes()) <= kGatheredBytes;
  const auto submit_to = gathered
      ? &submit<AllReduceGathered, const Tensor&, int64_t&, int, int>
      : &submit<AllReduceSliced, const Tensor&, int64_t&, int, int>;
  return submit_to(*group, async_op, tensor, reduction, group->rank(), group->num_ranks());
}

int64_t reduce_scatter(
    int64_t handle, const Tensor& output, TensorList inputs, int64_t reduction, bool async_op) {
  const auto group = group_of(handle);
  check_shards("reduce_scatter", inputs, group->num_ranks(), output, group->rank());
  return submit<ReduceScatter>(*group, async_op, output, inputs, reduction, group->rank(), group->num_ranks());
}

int64_t all_gather(int64_t handle, const Tensor& input, TensorList outputs, bool async_op) {
  const auto group = group_of(handle);
  check_shards("all_gather", outputs, group->num_ranks(), input, group->rank());
  return submit<AllGather>(*group, async_op, input, outputs, group->rank(), group->num_ranks());
}

int64_t broadcast(int64_t handle, const Tensor& tensor, int64_t root, bool async_op) {
  const auto group = group_of(handle);
  ACCEL_CHECK_VALUE(root >= 0 && root < group->num_ranks(), "broadcast: root ", root, " of ",
                    group->num_ranks(), " ranks");
  return submit<Broadcast>(*group, async_op, tensor, group->rank(), static_cast<int>(root));
}

TORCH_LIBRARY_FRAGMENT(accel, m) {
  m.def("_shared_memory_bytes(int num_ranks) -> int", &segment_bytes);
  m.def("_shared_memory_open(int fd, int rank, int[] pids, str name, int timeout_ms, int spin_us) -> int",
        &open_group);
  m.def("_shared_memory_close(int group) -> ()", &close_group);
  m.def("_shared_memory_all_reduce(int group, Tensor(a!) tensor, int op, bool async_op) -> int", &all_reduce);
  m.def("_shared_memory_reduce_scatter(int group, Tensor(a!) output, Tensor[] inputs, int op, bool async_op)"
        " -> int", &reduce_scatter);
  m.def("_shared_memory_all_gather(int group, Tensor input, Tensor(a!)[] outputs, bool async_op) -> int",
        &all_gather);
  m.def("_shared_memory_broadcast(int group, Tensor(a!) tensor, int root, bool async_op) -> int", &broadcast);
  m.def("_shared_memory_barrier(int group, bool async_op) -> int", [](int64_t group, bool async_op) {
    return submit<Barrier>(*group_of(group), async_op);
  });
  m.def("_shared_memory_wait(int group, int ticket) -> ()",
        [](int64_t group, int64_t ticket) { group_of(group)->wait(ticket); });
  m.def("_shared_memory_set_timeout(int group, int timeout_ms) -> ()", [](int64_t group, int64_t timeout_ms) {
    group_of(group)->set_timeout(std::chrono::milliseconds(timeout_ms));
  });
  m.def("_shared_memory_done(int group, int ticket) -> bool",
        [](int64_t group, int64_t ticket) { return group_of(group)->poll_done(ticket); });
}

}  // namespace
}  // namespace accel
#endif
