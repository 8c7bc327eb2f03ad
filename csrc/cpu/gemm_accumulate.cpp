// out_MN += a_KM^T b_KN for bf16 operands and an fp32 sum. The maths: accel/ops/gemm_accumulate.py.
//
// The product of tiles is oneDNN's (its batch-reduce kernel, as ATen exports it); this file only
// brings the operands into the layout that it wants: rows of a^T, and b with every two rows
// interleaved. Where a is itself a transpose, its rows are there and are only moved together. ATen has no
// entry of its own for bf16 operands with an fp32 result on CPUs.
//
// No instruction sets here: oneDNN chooses its own, and moving 16-bit words is as fast in SSE2.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "accel/check.h"
#include "accel/isa.h"

namespace accel {
namespace {

using at::BFloat16;
using at::Tensor;

// Of out [rows, cols] and of the depth, at most. On 2 threads of an AMD Zen 4, 2048^3: tiles of 64 x 64 x
// 512 reach 424 GFLOP/s, torch's own bf16 product 423; 64 x 64 x 256 327, 128 x 128 x 512 399. On 2 threads
// of an Intel Xeon with AMX 256 x 256 x 512 reach 2040, torch's own 2300 to 2600; 64 x 64 x 512 1410, 128 x
// 128 x 512 1900, 256 x 256 x 256 1510, 256 x 256 x 2048 1500.
struct Tile {
  int64_t rows, cols;
};
constexpr Tile kTile{64, 64}, kTileOfAmx{256, 256};
constexpr int64_t kDepth = 512;
// Beside each packed row of a, so that rows are not a power of 2 apart and share few sets of the caches: 6 %
// more on the Xeon.
constexpr int64_t kSkew = 32;

typedef uint16_t Words __attribute__((vector_size(16)));

// 8 x 8 words, rows to columns.
void transpose_8x8(const uint16_t* in, int64_t in_stride, uint16_t* out, int64_t out_stride) {
  Words rows[8];
  for (int i = 0; i < 8; ++i) std::memcpy(&rows[i], in + i * in_stride, sizeof(Words));
  // Interleaving row i with row i + 4, three times over, is the transpose.
  for (int round = 0; round < 3; ++round) {
    Words next[8];
    for (int i = 0; i < 4; ++i) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + 4], Words{0, 8, 1, 9, 2, 10, 3, 11});
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + 4], Words{4, 12, 5, 13, 6, 14, 7, 15});
    }
    for (int i = 0; i < 8; ++i) rows[i] = next[i];
  }
  for (int i = 0; i < 8; ++i) std::memcpy(out + i * out_stride, &rows[i], sizeof(Words));
}

// in: [depth, width] with rows `stride` apart -> out: [width, padded] with rows `pitch` apart, columns beyond
// depth zero.
void transpose(const uint16_t* in, int64_t stride, int64_t depth, int64_t width, uint16_t* out,
               int64_t padded, int64_t pitch) {
  for (int64_t d = 0; d < padded; d += 8) {
    for (int64_t w = 0; w < width; w += 8) {
      if (d + 8 <= depth && w + 8 <= width && d + 8 <= padded) {
        transpose_8x8(in + d * stride + w, stride, out + w * pitch + d, pitch);
        continue;
      }
      for (int64_t i = w; i < std::min(w + 8, width); ++i) {
        for (int64_t j = d; j < std::min(d + 8, padded); ++j) {
          out[i * pitch + j] = j < depth ? in[j * stride + i] : 0;
        }
      }
    }
  }
}

// in: [width, depth] with rows `stride` apart -> out: as transpose.
void copy_rows(const uint16_t* in, int64_t stride, int64_t depth, int64_t width, uint16_t* out,
               int64_t padded, int64_t pitch) {
  const int64_t count = std::min(depth, padded);
  for (int64_t w = 0; w < width; ++w) {
    std::memcpy(out + w * pitch, in + w * stride, count * sizeof(uint16_t));
    std::fill(out + w * pitch + count, out + w * pitch + padded, 0);
  }
}

// in: [depth, width] with rows `stride` apart -> out: [padded / 2, width, 2]; rows beyond depth zero.
void interleave(const uint16_t* in, int64_t stride, int64_t depth, int64_t width, uint16_t* out,
                int64_t padded) {
  for (int64_t d = 0; d < padded; d += 2) {
    const uint16_t* even = in + d * stride;
    const uint16_t* odd = even + stride;
    uint16_t* to = out + d * width;
    int64_t w = 0;
    if (d + 1 < depth) {
      for (; w + 8 <= width; w += 8) {
        Words a, b;
        std::memcpy(&a, even + w, sizeof(a));
        std::memcpy(&b, odd + w, sizeof(b));
        const Words low = __builtin_shuffle(a, b, Words{0, 8, 1, 9, 2, 10, 3, 11});
        const Words high = __builtin_shuffle(a, b, Words{4, 12, 5, 13, 6, 14, 7, 15});
        std::memcpy(to + 2 * w, &low, sizeof(low));
        std::memcpy(to + 2 * w + 8, &high, sizeof(high));
      }
    }
    for (; w < width; ++w) {
      to[2 * w] = even[w];
      to[2 * w + 1] = d + 1 < depth ? odd[w] : 0;
    }
  }
}

// out [M, N] with rows `stride` apart += a^T b of the packed operands a [M, K] with rows `pitch` apart and
// b [K / 2, N, 2].
void multiply_tile(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t pitch, const uint16_t* b,
                   float* out, int64_t stride) {
  at::native::cpublas::brgemm(
      m, n, k, /*lda=*/pitch, /*ldb=*/n, /*ldc=*/stride, /*add_C=*/true,
      reinterpret_cast<const BFloat16*>(a), reinterpret_cast<const BFloat16*>(b), out,
      /*is_vnni=*/true);
}

// Whether oneDNN has the kernel for this CPU: asked by multiplying, because ATen tells in no other
// way, and because a wrong layout would be a wrong result.
bool works_here() {
  constexpr int64_t kSize = 32;
  std::vector<uint16_t> a(kSize * kSize), b(kSize * kSize);
  std::vector<float> out(kSize * kSize, 1.0f);
  const auto value = [](int64_t i, int64_t j) { return static_cast<float>((3 * i + 5 * j) % 7 - 3); };
  for (int64_t i = 0; i < kSize; ++i) {
    for (int64_t j = 0; j < kSize; ++j) {
      a[i * kSize + j] = BFloat16(value(i, j)).x;
      b[(i / 2) * 2 * kSize + 2 * j + i % 2] = BFloat16(value(j, i)).x;
    }
  }
  try {
    multiply_tile(kSize, kSize, kSize, a.data(), kSize, b.data(), out.data(), kSize);
    at::native::cpublas::brgemm_release(/*is_vnni=*/true);
  } catch (const std::exception&) {  // ATen has none, or oneDNN was held below what ATen finds
    return false;
  }
  for (int64_t i = 0; i < kSize; ++i) {
    for (int64_t j = 0; j < kSize; ++j) {
      float want = 1.0f;
      for (int64_t k = 0; k < kSize; ++k) want += value(i, k) * value(j, k);  // whole numbers: exact
      if (out[i * kSize + j] != want) return false;
    }
  }
  return true;
}

bool has_gemm_accumulate() {
  static const bool works = works_here();
  return works;
}

void check(const Tensor& out, const Tensor& a, const Tensor& b) {
  ACCEL_CHECK_VALUE(out.dim() == 2 && a.dim() == 2 && b.dim() == 2,
                    "gemm_accumulate: out, a and b must be matrices, got ", out.sizes(), ", ",
                    a.sizes(), " and ", b.sizes());
  ACCEL_CHECK_VALUE(a.size(0) == b.size(0) && out.size(0) == a.size(1) && out.size(1) == b.size(1),
                    "gemm_accumulate: needs out [M, N], a [K, M] and b [K, N], got ", out.sizes(),
                    ", ", a.sizes(), " and ", b.sizes());
  ACCEL_CHECK_VALUE(out.scalar_type() == at::kFloat && a.scalar_type() == at::kBFloat16 &&
                        b.scalar_type() == at::kBFloat16,
                    "gemm_accumulate on CPU takes fp32 out and bf16 a and b, got ",
                    out.scalar_type(), ", ", a.scalar_type(), " and ", b.scalar_type());
  ACCEL_CHECK_VALUE(out.stride(1) == 1 || out.size(1) <= 1, "gemm_accumulate: the rows of out must be "
                    "contiguous, got strides ", out.strides());
  ACCEL_CHECK(has_gemm_accumulate(), "gemm_accumulate: oneDNN has no bf16 kernel for this CPU");
}

// Whether t is the transpose of a matrix with contiguous rows.
bool is_transpose(const Tensor& t) { return t.stride(0) == 1 && t.stride(1) >= t.size(0); }

// Rows must be contiguous and may be any distance apart.
Tensor with_contiguous_rows(const Tensor& t) {
  return t.stride(1) == 1 && t.stride(0) >= t.size(1) ? t : t.contiguous();
}

void gemm_accumulate_cpu(const Tensor& out, const Tensor& a_in, const Tensor& b_in) {
  check(out, a_in, b_in);
  const int64_t K = a_in.size(0), M = a_in.size(1), N = b_in.size(1);
  if (K == 0 || M == 0 || N == 0) return;
  const bool has_rows = is_transpose(a_in);  // of a^T
  const Tensor a = has_rows ? a_in : with_contiguous_rows(a_in);
  const Tensor b = with_contiguous_rows(b_in);
  const int64_t a_stride = a.stride(has_rows ? 1 : 0), b_stride = b.stride(0);
  const auto* a_data = reinterpret_cast<const uint16_t*>(a.const_data_ptr<BFloat16>());
  const auto* b_KN = reinterpret_cast<const uint16_t*>(b.const_data_ptr<BFloat16>());
  float* out_MN = out.mutable_data_ptr<float>();
  const int64_t out_stride = out.stride(0);
  const int64_t padded_K = at::divup(K, 2) * 2;
  // Fewer rows where that lets more threads work: the sums are the same.
  const Tile most = cpu_has_amx() ? kTileOfAmx : kTile;
  const int64_t rows_per_thread = at::divup(M, at::get_num_threads());
  const Tile tile{std::min(most.rows, at::divup(rows_per_thread, kTile.rows) * kTile.rows), most.cols};
  const auto depth_at = [&](int64_t k) { return std::min(kDepth, padded_K - k); };

  // b once for all threads: tiles [N / tile.cols][K / kDepth], each interleaved. As large as b itself.
  const Tensor packed = at::empty({padded_K * N}, b.options());
  auto* packed_b = reinterpret_cast<uint16_t*>(packed.mutable_data_ptr<BFloat16>());
  const int64_t num_col_tiles = at::divup(N, tile.cols);
  at::parallel_for(0, num_col_tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * tile.cols; n < std::min(end * tile.cols, N); n += tile.cols) {
      const int64_t width = std::min(tile.cols, N - n);
      for (int64_t k = 0; k < padded_K; k += kDepth) {
        interleave(b_KN + k * b_stride + n, b_stride, K - k, width,
                   packed_b + n * padded_K + k * width, depth_at(k));
      }
    }
  });

  at::parallel_for(0, at::divup(M, tile.rows), 1, [&](int64_t begin, int64_t end) {
    // Of a^T, in tiles of kDepth columns.
    const auto rows = std::make_unique_for_overwrite<uint16_t[]>(
        tile.rows * (padded_K + at::divup(K, kDepth) * kSkew));
    const auto rows_at = [&](int64_t k, int64_t height) {
      return rows.get() + (k + k / kDepth * kSkew) * height;
    };
    for (int64_t m = begin * tile.rows; m < std::min(end * tile.rows, M); m += tile.rows) {
      const int64_t height = std::min(tile.rows, M - m);
      for (int64_t k = 0; k < padded_K; k += kDepth) {
        uint16_t* to = rows_at(k, height);
        if (has_rows) {
          copy_rows(a_data + m * a_stride + k, a_stride, K - k, height, to, depth_at(k), depth_at(k) + kSkew);
        } else {
          transpose(a_data + k * a_stride + m, a_stride, K - k, height, to, depth_at(k), depth_at(k) + kSkew);
        }
      }
      for (int64_t n = 0; n < N; n += tile.cols) {
        const int64_t width = std::min(tile.cols, N - n);
        for (int64_t k = 0; k < padded_K; k += kDepth) {
          multiply_tile(height, width, depth_at(k), rows_at(k, height), depth_at(k) + kSkew,
                        packed_b + n * padded_K + k * width, out_MN + m * out_stride + n,
                        out_stride);
        }
      }
    }
    at::native::cpublas::brgemm_release(/*is_vnni=*/true);
  });
  out.unsafeGetTensorImpl()->bump_version();  // whoever saved out must hear of it
}

TORCH_LIBRARY_IMPL(accel, CPU, m) { m.impl("gemm_accumulate", &gemm_accumulate_cpu); }

TORCH_LIBRARY_FRAGMENT(accel, m) {
  m.def("_has_gemm_accumulate() -> bool", &has_gemm_accumulate);
}

}  // namespace
}  // namespace accel
