#include "qkv_rope.h"

#include <algorithm>

#include "rope_pairs.h"

// As rope.cu: a thread has one chunk of a token's angles, and two heads at a time under way. Heads are those
// of the product, in the order of its memory.

namespace accel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 2;

struct QkvRopeCall {
  QkvRope op;
  Divisor chunks, heads_per_group, threads_per_token;
  int heads_at_once, tokens_per_block;
};

// A head in the product, and by itself.
template <typename T>
struct HeadOfGroup {
  T* in_qkv;
  T* apart;
  bool is_value;

  ACCEL_DEVICE HeadOfGroup(const QkvRopeCall& call, uint32_t token, int head) {
    const QkvRope& op = call.op;
    const int group = call.heads_per_group.quotient(head);
    const int member = head - group * call.heads_per_group.value;
    const uint32_t num_heads = op.num_groups * call.heads_per_group.value;
    const auto head_dim = static_cast<uint32_t>(op.head_dim);
    in_qkv = static_cast<T*>(op.qkv) + (uint64_t{token} * num_heads + head) * head_dim;
    is_value = member == op.queries_per_group + 1;
    const bool is_query = member < op.queries_per_group;
    T* all = static_cast<T*>(is_query ? op.q : is_value ? op.v : op.k);
    const uint32_t per_token = is_query ? op.num_groups * op.queries_per_group : op.num_groups;
    const uint32_t at = is_query ? group * op.queries_per_group + member : group;
    apart = all + (uint64_t{token} * per_token + at) * head_dim;
  }
};

template <typename T, bool kInterleaved, bool kGradient>
__global__ void __launch_bounds__(kThreads, 3) qkv_rope_kernel(const QkvRopeCall call) {
  const QkvRope& op = call.op;
  const int token_of_block = call.threads_per_token.quotient(threadIdx.x);
  const int thread = threadIdx.x - token_of_block * call.threads_per_token.value;
  const uint32_t token = blockIdx.x * call.tokens_per_block + token_of_block;
  if (token_of_block >= call.tokens_per_block || token >= op.num_tokens) return;
  const int first_head = call.chunks.quotient(thread), half = op.head_dim / 2;
  const int j = (thread - first_head * call.chunks.value) * kPack<T>;
  const int num_heads = op.num_groups * call.heads_per_group.value;
  Angles<T, true> angles;
  for (int first = first_head; first < num_heads; first += kHeads * call.heads_at_once) {
    Chunk<T> in[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * call.heads_at_once;
      if (head >= num_heads) continue;
      const HeadOfGroup<T> at(call, token, head);
      in[i] = load_chunk<true, kInterleaved, T>(kGradient ? at.apart : at.in_qkv, j, half);
    }
    if (first == first_head) {  // not before: the loads above would wait too
      const auto num_batch = static_cast<uint32_t>(op.num_batch);
      const uint32_t s = num_batch == 1 ? token : token / num_batch;
      const uint32_t b = num_batch == 1 ? 0 : token % num_batch;
      const int64_t at = s * op.row_stride + b * op.batch_stride + j;
      load_floats<true, float, kPack<T>>(op.cos + at, kPack<T>, angles.cos[0]);
      load_floats<true, float, kPack<T>>(op.sin + at, kPack<T>, angles.sin[0]);
      if constexpr (kGradient) {
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) angles.sin[0][i] = -angles.sin[0][i];
      }
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * call.heads_at_once;
      if (head >= num_heads) continue;
      const HeadOfGroup<T> at(call, token, head);
      T* to = kGradient ? at.in_qkv : at.apart;
      if (at.is_value) {
        store_chunk<true, kInterleaved>(to, in[i], j, half);
      } else {
        rotate<T, true, kInterleaved, kInterleaved, true>(in[i], to, j, half, angles);
      }
    }
  }
}

}  // namespace

bool qkv_rope_takes(int64_t head_dim, Dtype dtype) {
  const int pack = kPackBytes / size_of(dtype);
  return head_dim > 0 && head_dim % (2 * pack) == 0 && head_dim / (2 * pack) <= kThreads;
}

void qkv_rope(const QkvRope& op, Queue queue) {
  auto* kernel = for_dtype(op.dtype, [&]<typename T> {
    if (op.interleaved) {
      return op.is_gradient ? &qkv_rope_kernel<T, true, true> : &qkv_rope_kernel<T, true, false>;
    }
    return op.is_gradient ? &qkv_rope_kernel<T, false, true> : &qkv_rope_kernel<T, false, false>;
  });
  const int chunks = op.head_dim / 2 / (kPackBytes / size_of(op.dtype));
  const int heads_per_group = op.queries_per_group + 2, num_heads = op.num_groups * heads_per_group;
  const auto turns = static_cast<int>(ceil_div(num_heads, kThreads / chunks));
  const auto heads_at_once = static_cast<int>(ceil_div(num_heads, turns));
  const int threads_per_token = chunks * heads_at_once;
  const int tokens_per_block = std::max(1, kThreads / 2 / threads_per_token);
  const QkvRopeCall call{op, Divisor(chunks), Divisor(heads_per_group), Divisor(threads_per_token),
                         heads_at_once, tokens_per_block};
  const int64_t warps = ceil_div(threads_per_token * tokens_per_block, kWarp);
  const auto num_blocks = static_cast<unsigned>(ceil_div(op.num_tokens, tokens_per_block));
  launch(kernel, num_blocks, static_cast<unsigned>(warps * kWarp), queue, call);
}

}  // namespace accel::cuda
