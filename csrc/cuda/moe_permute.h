// Moving tokens to their experts and back on CUDA: the launchers. The maths: accel/ops/moe_permute.py.
// T tokens, E experts, P rows, N columns.
#pragma once

#include "accel/cuda/launch.h"

namespace accel::cuda {

struct MoeRouting {
  const bool* routing_map;  // [T, E]
  int64_t* row_map;         // [P], the result
  int* counts;              // [C, E]: how many of a block's tokens go to each expert
  int num_tokens, num_experts, num_rows;
  int capacity;             // rows of each expert; below 0, as many as it has tokens,
  int align;                // up to a multiple of this
};

// C: how many blocks share the tokens.
int moe_routing_blocks(int num_tokens);
void moe_row_map(const MoeRouting& op, Queue queue);

// A row map and, once `moe_list_rows` was launched, its inverse: token t has the counts[t] rows before
// rows[ends[t]], in any order. Padding has those of token T.
struct MoeRows {
  const int64_t* row_map;  // [P]
  int num_rows, num_tokens;
  int* num_listed;  // 0, as are the counts, before the launch
  int* counts;      // [T + 1]
  int* ends;        // [T + 1]
  int* rows;        // [P]
};

void moe_list_rows(const MoeRows& map, Queue queue);

// Floats of a dtype of their own, or none.
struct AnyFloats {
  void* data = nullptr;
  Dtype dtype = Dtype::float32;
};

// rows[p] = tokens[t] and row_probs[p] = probs[t, e]; 0 for padding. Bits are moved.
struct MoeCopy {
  MoeRows map;
  const void* tokens;  // [T, N]
  void* rows;          // [P, N]
  const void* probs;   // [T, E] or null
  void* row_probs;     // [P]
  int64_t num_cols;
  int num_experts;
  int element_bytes, prob_bytes;
};

void moe_copy_row_by_row(const MoeCopy& op, Queue queue);
void moe_copy_token_by_token(const MoeCopy& op, Queue queue);  // needs the inverse

// Whether reading each token once saves more than its rows cost to list.
bool moe_listing_pays(int64_t num_rows, int64_t num_tokens, int64_t row_bytes, int num_processors);

// tokens[t] = sum of weights[p] rows[p]; dprobs[t, e] = sum of dweights[p].
struct MoeSum {
  MoeRows map;
  const void* rows;    // [P, N]
  void* tokens;        // [T, N]
  AnyFloats weights;   // [T, E], or [P] if E is 0, or none: all 1
  AnyFloats dweights;  // [P], or none
  AnyFloats dprobs;    // [T, E], or none
  int64_t num_cols;
  int num_experts;
  Dtype dtype;
};

void moe_sum(const MoeSum& op, Queue queue);

// drows[p] = weights[p] dtokens[t]; dweights[p] = sum of dtokens[t] rows[p]; dprobs as above.
struct MoeWeigh {
  MoeRows map;
  const void* dtokens;  // [T, N]
  const void* rows;     // [P, N]
  void* drows;          // [P, N]
  AnyFloats weights;    // [T, E], or [P] if E is 0
  AnyFloats dweights;   // [P]; float32 if E is not 0
  AnyFloats dprobs;     // [T, E], or none if E is 0
  int64_t num_cols;
  int num_experts;
  Dtype dtype;
};

void moe_weigh(const MoeWeigh& op, Queue queue);

}  // namespace accel::cuda
