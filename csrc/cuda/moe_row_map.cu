#include <algorithm>

#include "accel/cuda/device.h"
#include "moe_permute.h"

// Both directions of a row map. Rows are sorted, stably, by experts, as a counting sort does it, in two
// launches: blocks count their tokens, then each places them behind those of all blocks before. What goes
// the other way, the rows of a token, needs no order, since whoever sums them can find it: a token has few.

namespace accel::cuda {
namespace {

ACCEL_DEVICE int inclusive_sum_of_lanes(int v) {
  const int lane = threadIdx.x % kWarp;
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int below = __shfl_up_sync(kAllLanes, v, offset);
    if (lane >= offset) v += below;
  }
  return v;
}

// -- from tokens to rows -------------------------------------------------------------------------

constexpr int kThreads = 512;
constexpr int kTiles = 4;  // of 32 tokens, which a warp has under way for one expert
constexpr int kTokens = kTiles * kWarp;
constexpr int kMaxBlocks = 64;    // every block reads the counts of all: 64 KB for 256 experts
constexpr int kMaxExperts = 256;  // at a time

struct RoutingCall {
  MoeRouting op;
  int num_blocks, tokens_per_block;
  int log2_width;  // of the experts at a time
};

// Calls f(token, is_routed, how many tokens before it are) for the block's tokens and one expert, warp by
// warp; gives how many there are in all.
template <typename F>
ACCEL_DEVICE int for_tokens(const RoutingCall& call, int expert, F f) {
  const MoeRouting& op = call.op;
  const int lane = threadIdx.x % kWarp, begin = blockIdx.x * call.tokens_per_block;
  const int end = std::min(begin + call.tokens_per_block, op.num_tokens);
  int seen = 0;
  for (int first = begin + lane; first - lane < end; first += kTokens) {
    bool routed[kTiles];
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      const int token = first + k * kWarp;
      routed[k] = token < end && op.routing_map[static_cast<int64_t>(token) * op.num_experts + expert];
    }
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      const unsigned lanes = __ballot_sync(kAllLanes, routed[k]);
      const int token = first + k * kWarp;
      if (token < end) f(token, routed[k], seen + __popc(lanes & ((1u << lane) - 1)));
      seen += __popc(lanes);
    }
  }
  return seen;
}

// And the row map becomes padding.
__global__ void __launch_bounds__(kThreads, 1) moe_count_tokens(const RoutingCall call) {
  const MoeRouting& op = call.op;
  for (int expert = threadIdx.x / kWarp; expert < op.num_experts; expert += kThreads / kWarp) {
    const int count = for_tokens(call, expert, [](int, bool, int) {});
    if (threadIdx.x % kWarp == 0) op.counts[blockIdx.x * op.num_experts + expert] = count;
  }
  for (int64_t row = blockIdx.x * kThreads + threadIdx.x; row < op.num_rows; row += gridDim.x * kThreads) {
    op.row_map[row] = -1;
  }
}

struct ExpertRows {
  int total[kMaxExperts];   // tokens
  int before[kMaxExperts];  // of them, those of blocks before this
  int first[kMaxExperts];   // row
};

// Fills `experts` for up to kMaxExperts from `begin` on; gives the row behind theirs to the first warp.
ACCEL_DEVICE int find_rows(const RoutingCall& call, int begin, int first_row, ExpertRows& experts) {
  const MoeRouting& op = call.op;
  const int width = 1 << call.log2_width, end = std::min(begin + width, op.num_experts);
  __syncthreads();  // the experts before are placed
  for (int i = threadIdx.x; i < width; i += kThreads) experts.total[i] = experts.before[i] = 0;
  __syncthreads();
  const int mine = threadIdx.x & (width - 1), expert = begin + mine;
  int total = 0, before = 0;
  if (expert < end) {
    for (int block = threadIdx.x >> call.log2_width; block < call.num_blocks;
         block += kThreads >> call.log2_width) {
      const int count = op.counts[block * op.num_experts + expert];
      total += count;
      if (block < static_cast<int>(blockIdx.x)) before += count;
    }
  }
  atomicAdd(&experts.total[mine], total);
  atomicAdd(&experts.before[mine], before);
  __syncthreads();
  if (threadIdx.x < kWarp) {
    for (int i = threadIdx.x; i - static_cast<int>(threadIdx.x) < width; i += kWarp) {
      const int tokens = i < width ? experts.total[i] : 0;
      const int wanted = op.capacity >= 0 ? op.capacity : (tokens + op.align - 1) / op.align * op.align;
      const int behind = first_row + inclusive_sum_of_lanes(wanted);
      if (i < width) experts.first[i] = behind - wanted;
      first_row = __shfl_sync(kAllLanes, behind, kWarp - 1);
    }
  }
  __syncthreads();
  return first_row;
}

template <bool kHasCapacity>
__global__ void __launch_bounds__(kThreads, 1) moe_place_tokens(const RoutingCall call) {
  const MoeRouting& op = call.op;
  auto& experts = block_shared<ExpertRows>();
  int first_row = 0;
  for (int begin = 0; begin < op.num_experts; begin += 1 << call.log2_width) {
    first_row = find_rows(call, begin, first_row, experts);
    const int end = std::min(begin + (1 << call.log2_width), op.num_experts);
    for (int expert = begin + threadIdx.x / kWarp; expert < end; expert += kThreads / kWarp) {
      const int total = experts.total[expert - begin], before = experts.before[expert - begin];
      const int first = experts.first[expert - begin];
      for_tokens(call, expert, [&](int token, bool is_routed, int seen) {
        seen += before;
        // What an expert has left over goes to the first tokens of others.
        const int slot = is_routed || !kHasCapacity ? seen : total + token - seen;
        const bool fits = kHasCapacity ? slot < op.capacity : is_routed;
        if (fits && first + slot < op.num_rows) {
          op.row_map[first + slot] = static_cast<int64_t>(expert) * op.num_tokens + token;
        }
      });
    }
  }
}

// -- from rows to tokens -------------------------------------------------------------------------

constexpr int kListThreads = 256;

ACCEL_DEVICE int64_t thread_of_grid() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// T for padding.
ACCEL_DEVICE int token_of_row(const MoeRows& map, int64_t row) {
  const int64_t place = map.row_map[row];
  return place < 0 ? map.num_tokens : static_cast<int>(place % map.num_tokens);
}

__global__ void __launch_bounds__(kListThreads) moe_count_rows(const MoeRows map) {
  const int64_t row = thread_of_grid();
  if (row < map.num_rows) atomicAdd(&map.counts[token_of_row(map, row)], 1);
}

// Gives each token a stretch of the list, warp by warp as they come; `ends` are still where it begins.
__global__ void __launch_bounds__(kListThreads) moe_divide_list(const MoeRows map) {
  const int64_t token = thread_of_grid();
  const int count = token <= map.num_tokens ? map.counts[token] : 0;
  const int behind = inclusive_sum_of_lanes(count);
  int first = 0;
  if (threadIdx.x % kWarp == kWarp - 1) first = atomicAdd(map.num_listed, behind);
  first = __shfl_sync(kAllLanes, first, kWarp - 1);
  if (token <= map.num_tokens) map.ends[token] = first + behind - count;
}

__global__ void __launch_bounds__(kListThreads) moe_fill_list(const MoeRows map) {
  const int64_t row = thread_of_grid();
  if (row < map.num_rows) {
    map.rows[atomicAdd(&map.ends[token_of_row(map, row)], 1)] = static_cast<int>(row);
  }
}

}  // namespace

int moe_routing_blocks(int num_tokens) {
  return static_cast<int>(std::min<int64_t>(kMaxBlocks, ceil_div(num_tokens, kTokens)));
}

void moe_row_map(const MoeRouting& op, Queue queue) {
  const int num_blocks = moe_routing_blocks(op.num_tokens);
  const int64_t turns = ceil_div(op.num_tokens, int64_t{kTokens} * num_blocks);
  RoutingCall call{op, num_blocks, static_cast<int>(turns) * kTokens, 0};
  while ((1 << call.log2_width) < std::min(op.num_experts, kMaxExperts)) ++call.log2_width;
  launch(moe_count_tokens, call.num_blocks, kThreads, queue, call);
  auto* place = op.capacity >= 0 ? &moe_place_tokens<true> : &moe_place_tokens<false>;
  launch(place, call.num_blocks, kThreads, queue, call);
}

void moe_list_rows(const MoeRows& map, Queue queue) {
  const auto rows = static_cast<unsigned>(ceil_div(map.num_rows, kListThreads));
  const auto tokens = static_cast<unsigned>(ceil_div(int64_t{map.num_tokens} + 1, kListThreads));
  launch(moe_count_rows, rows, kListThreads, queue, map);
  launch(moe_divide_list, tokens, kListThreads, queue, map);
  launch(moe_fill_list, rows, kListThreads, queue, map);
}

}  // namespace accel::cuda
