#include "rope.h"

#include <algorithm>

#include "rope_pairs.h"

// A thread has one chunk of a token's cosines and sines, those of as many pairs as a pack has elements, and
// rotates that chunk of two heads at a time, of all tensors of the call. (One by one, and with angles for
// each member of a pair, 8192 tokens of 40 heads took 62 us of an H200 in place of 59. With divisions of 64
// bits for the place of a head, and the code for packed sequences in the same kernel, 56 in place of 44.)

namespace accel::cuda {
namespace {

constexpr int kThreads = 256;  // at most, and half of it at least where there are tokens enough

struct RopeGrid {
  Divisor chunks;  // of a head
  int heads_at_once;  // of a token
  Divisor threads_per_token;
  int tokens_per_block;
};

// Fewer than 2^31: the bindings see to it.
struct Token {
  uint32_t number, s, b;
  ACCEL_DEVICE Token(uint32_t number, uint32_t num_batch) : number(number), s(number), b(0) {
    if (num_batch == 1) return;
    s = number / num_batch;
    b = number % num_batch;
  }
};

struct RopeCall {
  Rope op;
  RopeGrid grid;
};

ACCEL_DEVICE int64_t start_of(const Rope& op, int64_t sequence) {
  return op.cu_seqlens_is_long ? static_cast<const int64_t*>(op.cu_seqlens)[sequence]
                               : static_cast<const int*>(op.cu_seqlens)[sequence];
}

// The tables' row for token s; -1 where the sequences have none for it, or the tables.
ACCEL_DEVICE int64_t row_of_token(const Rope& op, int64_t s) {
  const int64_t origin = start_of(op, 0);
  // The last sequence that starts at the token or before; empty ones share their start with the next.
  int64_t sequence = 0, beyond = op.num_sequences;
  while (beyond - sequence > 1) {
    const int64_t middle = (sequence + beyond) / 2;
    (start_of(op, middle) - origin <= s * op.cp_size ? sequence : beyond) = middle;
  }
  if (op.num_sequences == 0) return -1;
  const int64_t start = start_of(op, sequence), length = start_of(op, sequence + 1) - start;
  const int64_t at = s - (start - origin) / op.cp_size;
  if (at < 0 || at * op.cp_size >= length) return -1;
  int64_t row = at;
  if (op.cp_size > 1) {
    // Rank r has chunks r and 2 cp_size - 1 - r of 2 cp_size.
    const int64_t chunk = length / (2 * op.cp_size);
    if (chunk * 2 * op.cp_size != length) return -1;
    row = at < chunk ? op.cp_rank * chunk + at : (2 * op.cp_size - 2 - op.cp_rank) * chunk + at;
  }
  // With a row for each token, every token has its own; else positions start anew in each sequence.
  if (start_of(op, op.num_sequences) == op.num_rows) row += start;
  return 0 <= row && row < op.num_rows ? row : -1;
}

template <typename T, bool kWhole, bool kSame>
ACCEL_DEVICE void load_angles(const Rope& op, int64_t row, uint32_t batch, int j, Angles<T, kSame>& angles) {
  const int64_t at = row * op.row_stride + batch * op.batch_stride + j;
  const int count = kWhole ? kPack<T> : op.half - j;
#pragma unroll
  for (int member = 0; member < angles.kMembers; ++member) {
    load_floats<kWhole, float, kPack<T>>(op.cos + at + member * op.second, count, angles.cos[member]);
    load_floats<kWhole, float, kPack<T>>(op.sin + at + member * op.second, count, angles.sin[member]);
  }
}

// kLean: strides are narrow, and there are no packed sequences.
template <typename T, bool kWhole, bool kSame, bool kLean>
ACCEL_DEVICE void load_angles_of_token(const Rope& op, const Token& token, int j, Angles<T, kSame>& angles) {
  int64_t row = token.s;
  if constexpr (!kLean) {
    if (op.cu_seqlens) row = row_of_token(op, row);
  }
  if (kLean || row >= 0) {
    load_angles<T, kWhole, kSame>(op, row, token.b, j, angles);
  } else {  // of a position that is not: nobody may take what comes out for numbers
#pragma unroll
    for (int i = 0; i < angles.kMembers * kPack<T>; ++i) {
      angles.cos[i / kPack<T>][i % kPack<T>] = angles.sin[i / kPack<T>][i % kPack<T>] = NAN;
    }
  }
  if (!op.inverse) return;
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {  // the transpose
    const float first = angles.sin[0][i];
    angles.sin[0][i] = -angles.sin[angles.kMembers - 1][i];
    if constexpr (!kSame) angles.sin[1][i] = -first;
  }
}

template <bool kNarrow>
ACCEL_DEVICE uint64_t times(uint32_t i, int64_t stride) {
  return kNarrow ? uint64_t{i} * static_cast<uint32_t>(stride) : i * static_cast<uint64_t>(stride);
}

// Where a token's head lies, in x and in y. kNarrow: no stride takes more than 32 bits, so that each product
// is one instruction.
template <typename T, bool kNarrow>
struct Head {
  const T* x;
  T* y;
  int head_dim;
  ACCEL_DEVICE Head(const Rope& op, const Token& token, int head) {
    const int num_first = op.tensors[0].num_heads;
    const RopeTensor& t = op.tensors[head < num_first ? 0 : 1];
    const uint32_t h = head < num_first ? head : head - num_first;
    x = static_cast<const T*>(t.x) + times<kNarrow>(token.s, t.stride_S) +
        times<kNarrow>(token.b, t.stride_B) + times<kNarrow>(h, t.stride_H);
    y = static_cast<T*>(t.y) + times<kNarrow>(token.number, int64_t{t.num_heads} * t.head_dim) +
        times<kNarrow>(h, t.head_dim);
    head_dim = t.head_dim;
  }
};

constexpr int kHeads = 2;  // that a thread has under way

template <typename T, bool kWhole, bool kInterleavedIn, bool kInterleavedOut, bool kSame, bool kLean>
__global__ void __launch_bounds__(kThreads, !kLean ? 1 : kInterleavedIn == kInterleavedOut ? 4 : 3)
    rope_kernel(const RopeCall call) {
  const Rope& op = call.op;
  const RopeGrid& grid = call.grid;
  const int token_of_block = grid.threads_per_token.quotient(threadIdx.x);
  const int thread = threadIdx.x - token_of_block * grid.threads_per_token.value;
  const uint32_t number = blockIdx.x * grid.tokens_per_block + token_of_block;
  if (token_of_block >= grid.tokens_per_block || number >= op.num_tokens) return;
  const Token token(number, static_cast<uint32_t>(op.num_batch));
  const int first_head = grid.chunks.quotient(thread);
  const int j = (thread - first_head * grid.chunks.value) * kPack<T>;
  Angles<T, kSame> angles;
  const int num_heads = op.tensors[0].num_heads + op.tensors[1].num_heads;
  for (int first = first_head; first < num_heads; first += kHeads * grid.heads_at_once) {
    if (!kWhole && j >= op.half) break;
    Chunk<T> in[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * grid.heads_at_once;
      if (head >= num_heads) continue;
      in[i] = load_chunk<kWhole, kInterleavedIn>(Head<T, kLean>(op, token, head).x, j, op.half);
    }
    // Not before: to invert them waits for them, and the loads of x would wait too.
    if (first == first_head) load_angles_of_token<T, kWhole, kSame, kLean>(op, token, j, angles);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * grid.heads_at_once;
      if (head >= num_heads) continue;
      rotate<T, kWhole, kInterleavedIn, kInterleavedOut, kSame>(in[i], Head<T, kLean>(op, token, head).y, j,
                                                                op.half, angles);
    }
  }
  for (int head = first_head; head < num_heads; head += grid.heads_at_once) {  // what is kept as it is
    const Head<T, kLean> at(op, token, head);
    for (int col = 2 * op.half + j; col < at.head_dim; col += grid.chunks.value * kPack<T>) {
      const int count = at.head_dim - col;
      store<kWhole>(at.y + col, load<kWhole>(at.x + col, count), count);
    }
  }
}

bool whole(const Rope& op) {
  const int pack = kPackBytes / size_of(op.dtype);
  bool whole = op.half && op.half % pack == 0 && whole_packs(0, op.dtype, op.cos, op.sin);
  for (const RopeTensor& t : op.tensors) {
    if (t.num_heads == 0) continue;
    whole = whole && whole_packs(t.head_dim, op.dtype, t.x, t.y) && t.stride_S % pack == 0 &&
        t.stride_B % pack == 0 && t.stride_H % pack == 0;
  }
  return whole;
}

bool lean(const Rope& op) {
  bool lean = !op.cu_seqlens;
  for (const RopeTensor& t : op.tensors) {
    const int64_t strides[] = {t.stride_S, t.stride_B, t.stride_H, int64_t{t.num_heads} * t.head_dim};
    for (const int64_t stride : strides) lean = lean && stride >> 32 == 0;
  }
  return lean;
}

template <typename T, bool kWhole, bool kSame, bool kLean>
auto kernel_for(bool interleaved_in, bool interleaved_out) {
  if (interleaved_in) {
    return interleaved_out ? &rope_kernel<T, kWhole, true, true, kSame, kLean>
                           : &rope_kernel<T, kWhole, true, false, kSame, kLean>;
  }
  return interleaved_out ? &rope_kernel<T, kWhole, false, true, kSame, kLean>
                         : &rope_kernel<T, kWhole, false, false, kSame, kLean>;
}

}  // namespace

void rope(const Rope& op, Queue queue) {
  const bool is_whole = whole(op), is_lean = lean(op);
  auto* kernel = for_dtype(op.dtype, [&]<typename T> {
    const bool in = op.interleaved_in, out = op.interleaved_out;
    if (!is_whole) return kernel_for<T, false, false, false>(in, out);
    if (op.second) return kernel_for<T, true, false, false>(in, out);
    return is_lean ? kernel_for<T, true, true, true>(in, out) : kernel_for<T, true, true, false>(in, out);
  });
  const int64_t num_heads = op.tensors[0].num_heads + op.tensors[1].num_heads;
  // No head has more chunks than a block has threads: the bindings see to it.
  const int chunks =
      static_cast<int>(std::max<int64_t>(1, ceil_div(op.half, kPackBytes / size_of(op.dtype))));
  const int64_t turns = ceil_div(num_heads, std::max(1, kThreads / chunks));
  const int heads_at_once = static_cast<int>(ceil_div(num_heads, turns));
  const int threads_per_token = chunks * heads_at_once;
  const int tokens_per_block = std::max(1, kThreads / 2 / threads_per_token);
  const RopeGrid grid{Divisor(chunks), heads_at_once, Divisor(threads_per_token), tokens_per_block};
  const int64_t warps = ceil_div(threads_per_token * tokens_per_block, kWarp);
  const auto num_blocks = static_cast<unsigned>(ceil_div(op.num_tokens, tokens_per_block));
  launch(kernel, num_blocks, static_cast<unsigned>(warps * kWarp), queue, RopeCall{op, grid});
}

}  // namespace accel::cuda
