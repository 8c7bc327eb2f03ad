#include "rope.h"

#include <algorithm>

#include "accel/cuda/device.h"

// A thread has one chunk of a token's cosines and sines, those of as many pairs as a pack has elements, and
// rotates that chunk of two heads at a time, of all tensors of the call. (One by one, and with angles for
// each member of a pair, 8192 tokens of 40 heads took 62 us of an H200 in place of 59.)

namespace accel::cuda {
namespace {

constexpr int kThreads = 256;  // at most, and half of it at least where there are tokens enough

struct RopeGrid {
  int chunks;            // of a head
  int heads_at_once;     // of a token
  int tokens_per_block;
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
  if (!op.cu_seqlens) return s;
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

// kSame: both members of a pair have one angle, as in every model.
template <typename T, bool kSame>
struct Angles {
  static constexpr int kMembers = kSame ? 1 : 2;
  float cos[kMembers][kPack<T>], sin[kMembers][kPack<T>];
};

template <typename T, bool kWhole, bool kSame>
ACCEL_DEVICE void load_angles(const Rope& op, int64_t row, int64_t batch, int64_t j,
                              Angles<T, kSame>& angles) {
  const int64_t at = row * op.row_stride + batch * op.batch_stride + j, count = op.half - j;
#pragma unroll
  for (int member = 0; member < angles.kMembers; ++member) {
    load_floats<kWhole, float, kPack<T>>(op.cos + at + member * op.second, count, angles.cos[member]);
    load_floats<kWhole, float, kPack<T>>(op.sin + at + member * op.second, count, angles.sin[member]);
  }
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    if (op.inverse) {  // the transpose
      const float first = angles.sin[0][i];
      angles.sin[0][i] = -angles.sin[angles.kMembers - 1][i];
      if constexpr (!kSame) angles.sin[1][i] = -first;
    }
  }
}

// Where pack 0 or 1 of the pairs from j on lies in a head, and how many of its elements there are.
template <bool kInterleaved, typename T>
struct PlaceOf {
  int64_t at, count;
  ACCEL_DEVICE PlaceOf(int pack, int64_t j, int64_t half)
      : at(kInterleaved ? 2 * j + pack * kPack<T> : j + pack * half),
        count(kInterleaved ? 2 * (half - j) - pack * kPack<T> : half - j) {}
};

// The packs of a chunk of one head.
template <typename T>
struct Chunk {
  Pack<T> packs[2];
};

template <bool kWhole, bool kInterleaved, typename T>
ACCEL_DEVICE Chunk<T> load_chunk(const T* x, int64_t j, int64_t half) {
  const PlaceOf<kInterleaved, T> from_1(0, j, half), from_2(1, j, half);
  return {{load<kWhole>(x + from_1.at, from_1.count), load<kWhole>(x + from_2.at, from_2.count)}};
}

template <typename T, bool kWhole, bool kInterleavedIn, bool kInterleavedOut, bool kSame>
ACCEL_DEVICE void rotate(const Chunk<T>& in, T* y, int64_t j, int64_t half, const Angles<T, kSame>& angles) {
  constexpr int kHalfPack = kPack<T> / 2, kSecond = kSame ? 0 : 1;
  float out[2][kPack<T>];
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    float x_1 = in.packs[0][i], x_2 = in.packs[1][i];
    if constexpr (kInterleavedIn) {
      const Pack<T>& pack = in.packs[i / kHalfPack];
      x_1 = pack[2 * (i % kHalfPack)];
      x_2 = pack[2 * (i % kHalfPack) + 1];
    }
    // Fused by hand: the same bits whichever kernel it is.
    const float y_1 = fmaf(x_1, angles.cos[0][i], -(x_2 * angles.sin[0][i]));
    const float y_2 = fmaf(x_2, angles.cos[kSecond][i], x_1 * angles.sin[kSecond][i]);
    if constexpr (kInterleavedOut) {
      out[i / kHalfPack][2 * (i % kHalfPack)] = y_1;
      out[i / kHalfPack][2 * (i % kHalfPack) + 1] = y_2;
    } else {
      out[0][i] = y_1;
      out[1][i] = y_2;
    }
  }
  const PlaceOf<kInterleavedOut, T> to_1(0, j, half), to_2(1, j, half);
  store<kWhole>(y + to_1.at, pack_of<T>(out[0]), to_1.count);
  store<kWhole>(y + to_2.at, pack_of<T>(out[1]), to_2.count);
}

// Where a token's head lies, in x and in y.
template <typename T>
struct Head {
  const T* x;
  T* y;
  int64_t head_dim;
  ACCEL_DEVICE Head(const Rope& op, int64_t token, int head) {
    const int num_first = op.tensors[0].num_heads;
    const RopeTensor& t = op.tensors[head < num_first ? 0 : 1];
    const int64_t h = head < num_first ? head : head - num_first;
    x = static_cast<const T*>(t.x) + token / op.num_batch * t.stride_S + token % op.num_batch * t.stride_B +
        h * t.stride_H;
    y = static_cast<T*>(t.y) + (token * t.num_heads + h) * t.head_dim;
    head_dim = t.head_dim;
  }
};

constexpr int kHeads = 2;  // that a thread has under way

template <typename T, bool kWhole, bool kInterleavedIn, bool kInterleavedOut, bool kSame>
__global__ void __launch_bounds__(kThreads) rope_kernel(const RopeCall call) {
  const Rope& op = call.op;
  const RopeGrid& grid = call.grid;
  const int threads_per_token = grid.chunks * grid.heads_at_once;
  const int token_of_block = threadIdx.x / threads_per_token;
  const int thread = threadIdx.x % threads_per_token;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * grid.tokens_per_block + token_of_block;
  if (token_of_block >= grid.tokens_per_block || token >= op.num_tokens) return;
  const int64_t s = token / op.num_batch, b = token % op.num_batch;
  const int chunk = thread % grid.chunks;
  const int64_t j = static_cast<int64_t>(chunk) * kPack<T>;
  const int64_t row = row_of_token(op, s);
  Angles<T, kSame> angles;
  if (row >= 0) {
    load_angles<T, kWhole, kSame>(op, row, b, j, angles);
  } else {  // of a position that is not: nobody may take what comes out for numbers
#pragma unroll
    for (int i = 0; i < angles.kMembers * kPack<T>; ++i) {
      angles.cos[i / kPack<T>][i % kPack<T>] = angles.sin[i / kPack<T>][i % kPack<T>] = NAN;
    }
  }
  const int num_heads = op.tensors[0].num_heads + op.tensors[1].num_heads;
  for (int first = thread / grid.chunks; first < num_heads; first += kHeads * grid.heads_at_once) {
    Chunk<T> in[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * grid.heads_at_once;
      if (head < num_heads && j < op.half) {
        in[i] = load_chunk<kWhole, kInterleavedIn>(Head<T>(op, token, head).x, j, op.half);
      }
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * grid.heads_at_once;
      if (head >= num_heads) continue;
      const Head<T> at(op, token, head);
      if (j < op.half) {
        rotate<T, kWhole, kInterleavedIn, kInterleavedOut, kSame>(in[i], at.y, j, op.half, angles);
      }
      const int64_t step = static_cast<int64_t>(grid.chunks) * kPack<T>;
      for (int64_t kept = 2 * op.half + j; kept < at.head_dim; kept += step) {
        const int64_t count = at.head_dim - kept;
        store<kWhole>(at.y + kept, load<kWhole>(at.x + kept, count), count);
      }
    }
  }
}

bool whole(const Rope& op) {
  const int pack = kPackBytes / size_of(op.dtype);
  bool whole = op.half % pack == 0 && whole_packs(0, op.dtype, op.cos, op.sin);
  for (const RopeTensor& t : op.tensors) {
    if (t.num_heads == 0) continue;
    whole = whole && whole_packs(t.head_dim, op.dtype, t.x, t.y) && t.stride_S % pack == 0 &&
        t.stride_B % pack == 0 && t.stride_H % pack == 0;
  }
  return whole;
}

template <typename T, bool kWhole, bool kSame>
auto kernel_for(bool interleaved_in, bool interleaved_out) {
  if (interleaved_in) {
    return interleaved_out ? &rope_kernel<T, kWhole, true, true, kSame>
                           : &rope_kernel<T, kWhole, true, false, kSame>;
  }
  return interleaved_out ? &rope_kernel<T, kWhole, false, true, kSame>
                         : &rope_kernel<T, kWhole, false, false, kSame>;
}

}  // namespace

void rope(const Rope& op, Queue queue) {
  const bool is_whole = whole(op);
  auto* kernel = for_dtype(op.dtype, [&]<typename T> {
    if (!is_whole) return kernel_for<T, false, false>(op.interleaved_in, op.interleaved_out);
    return op.second == 0 ? kernel_for<T, true, true>(op.interleaved_in, op.interleaved_out)
                          : kernel_for<T, true, false>(op.interleaved_in, op.interleaved_out);
  });
  const int64_t num_heads = op.tensors[0].num_heads + op.tensors[1].num_heads;
  RopeGrid grid;
  // No head has more chunks than a block has threads: the bindings see to it.
  grid.chunks = static_cast<int>(std::max<int64_t>(1, ceil_div(op.half, kPackBytes / size_of(op.dtype))));
  const int64_t turns = ceil_div(num_heads, std::max(1, kThreads / grid.chunks));
  grid.heads_at_once = static_cast<int>(ceil_div(num_heads, turns));
  const int threads_per_token = grid.chunks * grid.heads_at_once;
  grid.tokens_per_block = std::max(1, kThreads / 2 / threads_per_token);
  const int64_t warps = ceil_div(threads_per_token * grid.tokens_per_block, kWarp);
  const auto num_blocks = static_cast<unsigned>(ceil_div(op.num_tokens, grid.tokens_per_block));
  launch(kernel, num_blocks, static_cast<unsigned>(warps * kWarp), queue, RopeCall{op, grid});
}

}  // namespace accel::cuda
