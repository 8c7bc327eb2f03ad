// What the rotations of heads have in common (rope.cu, qkv_rope.cu): the same bits in both.
#pragma once

#include "accel/cuda/device.h"

namespace accel::cuda {
namespace {

// To divide the numbers of a block's threads: exact below 2^10.
struct Divisor {
  int value, reciprocal;
  explicit Divisor(int value) : value(value), reciprocal(((1 << 20) + value - 1) / value) {}
  ACCEL_DEVICE int quotient(int n) const { return n * reciprocal >> 20; }
};

// kSame: both members of a pair have one angle, as in every model.
template <typename T, bool kSame>
struct Angles {
  static constexpr int kMembers = kSame ? 1 : 2;
  float cos[kMembers][kPack<T>], sin[kMembers][kPack<T>];
};

// Where pack 0 or 1 of the pairs from j on lies in a head, and how many of its elements there are.
template <bool kWhole, bool kInterleaved, typename T>
struct PlaceOf {
  int at, count;
  ACCEL_DEVICE PlaceOf(int pack, int j, int half)
      : at(kInterleaved ? 2 * j + pack * kPack<T> : j + pack * half),
        count(kWhole ? kPack<T> : kInterleaved ? 2 * (half - j) - pack * kPack<T> : half - j) {}
};

// The packs of a chunk of one head.
template <typename T>
struct Chunk {
  Pack<T> packs[2];
};

template <bool kWhole, bool kInterleaved, typename T>
ACCEL_DEVICE Chunk<T> load_chunk(const T* x, int j, int half) {
  const PlaceOf<kWhole, kInterleaved, T> from_1(0, j, half), from_2(1, j, half);
  return {{load<kWhole>(x + from_1.at, from_1.count), load<kWhole>(x + from_2.at, from_2.count)}};
}

template <bool kWhole, bool kInterleaved, typename T>
ACCEL_DEVICE void store_chunk(T* y, const Chunk<T>& out, int j, int half) {
  const PlaceOf<kWhole, kInterleaved, T> to_1(0, j, half), to_2(1, j, half);
  store<kWhole>(y + to_1.at, out.packs[0], to_1.count);
  store<kWhole>(y + to_2.at, out.packs[1], to_2.count);
}

template <typename T, bool kWhole, bool kInterleavedIn, bool kInterleavedOut, bool kSame>
ACCEL_DEVICE void rotate(const Chunk<T>& in, T* y, int j, int half, const Angles<T, kSame>& angles) {
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
  store_chunk<kWhole, kInterleavedOut, T>(y, {{pack_of<T>(out[0]), pack_of<T>(out[1])}}, j, half);
}

}  // namespace
}  // namespace accel::cuda
