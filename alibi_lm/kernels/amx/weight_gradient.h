// The gradient of a linear layer's weight: gradient^T values, in blocks whose fp32 sums stay in cache.
//
// A library transposes the first operand in memory, or takes it at half speed. Here it is transposed
// a block at a time, in cache, and the second operand is packed once for all blocks.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include "lanes.h"

namespace alibi_lm {

constexpr int64_t kHeight = 384;  // of a block, at most: with its width, 1.1 MiB of sums
constexpr int64_t kWidth = 768;
constexpr int64_t kSmallest = 128;
constexpr int64_t kReduced = 256;  // terms of the sums that are packed at once

// How a result [rows, columns] is split into equal blocks, at least one for each thread.
struct Blocks {
  Blocks(int64_t rows, int64_t columns, int64_t threads) {
    down = (rows + kHeight - 1) / kHeight;
    across = (columns + kWidth - 1) / kWidth;
    while (down * across < threads) {
      const bool by_rows = rows / down >= columns / across;
      int64_t& blocks = by_rows ? down : across;
      if ((by_rows ? rows : columns) / (2 * blocks) < kSmallest) break;
      blocks *= 2;
    }
    height = round_up((rows + down - 1) / down, 2 * kLanes);
    width = round_up((columns + across - 1) / across, kQueries);
    down = (rows + height - 1) / height;
    across = (columns + width - 1) / width;
  }
  int64_t down, across, height, width;
};

struct GradientBuffers {
  GradientBuffers() : first(kHeight * kReduced), sums(kHeight * kWidth) {}
  Buffer<BFloat16> first;
  Buffer<float> sums;  // [height][width] of a block
};

// sums = gradient^T values, of gradient [count, height] and the columns [column, column + width) of
// values, packed by `pack_rows` `kReduced` rows at a time, `stride` columns in all.
inline void block_product(Rows<const BFloat16> gradient, const BFloat16* packed, int64_t count,
                          int64_t stride, int64_t column, int64_t height, int64_t width,
                          GradientBuffers& buffer) {
  for (int64_t row = 0; row < count; row += kReduced) {
    const int64_t terms = std::min(kReduced, count - row), padded = round_up(terms, kQueries);
    transpose_rows({gradient.at(row), gradient.stride}, terms, padded, height, buffer.first);
    for (int64_t i = 0; i < width; i += kQueries) {
      const int64_t panel = std::min(kQueries, width - i);
      at::native::cpublas::brgemm(height, panel, padded, padded, panel, width, row > 0, buffer.first,
                                  packed + row * stride + (column + i) * padded, buffer.sums + i);
    }
  }
}

inline void store_sums(const float* sums, int64_t height, int64_t width, Rows<BFloat16> out) {
  for (int64_t row = 0; row < height; ++row) {
    for (int64_t column = 0; column < width; column += kLanes) {
      store_bf16(out.at(row) + column, _mm512_loadu_ps(sums + row * width + column));
    }
  }
}

inline void store_sums(const float* sums, int64_t height, int64_t width, Rows<float> out) {
  for (int64_t row = 0; row < height; ++row) {
    for (int64_t column = 0; column < width; column += kLanes) {
      float* to = out.at(row) + column;
      const __m512 sum = _mm512_loadu_ps(sums + row * width + column);
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum));
    }
  }
}

inline at::Tensor pack_values(const at::Tensor& values) {
  const int64_t count = values.size(0), width = values.size(1);
  const Rows<const BFloat16> rows{values.data_ptr<BFloat16>(), values.stride(0)};
  at::Tensor packed = at::empty({round_up(count, kQueries), width}, values.options());
  at::parallel_for(0, (count + kReduced - 1) / kReduced, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kReduced; row < std::min(end * kReduced, count); row += kReduced) {
      const int64_t terms = std::min(kReduced, count - row);
      pack_rows({rows.at(row), rows.stride}, terms, round_up(terms, kQueries), width,
                  packed.data_ptr<BFloat16>() + row * width);
    }
  });
  return packed;
}

template <typename T>
void fill_gradient(const at::Tensor& gradient, const at::Tensor& values, const at::Tensor& out) {
  const Blocks blocks(out.size(0), out.size(1), at::get_num_threads());
  const Rows<const BFloat16> rows{gradient.data_ptr<BFloat16>(), gradient.stride(0)};
  const Rows<T> to{out.data_ptr<T>(), out.stride(0)};
  const at::Tensor packed = pack_values(values);
  at::parallel_for(0, blocks.down * blocks.across, 1, [&](int64_t begin, int64_t end) {
    GradientBuffers buffer;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / blocks.across * blocks.height;
      const int64_t column = i % blocks.across * blocks.width;
      const int64_t height = std::min(blocks.height, out.size(0) - row);
      const int64_t width = std::min(blocks.width, out.size(1) - column);
      block_product({rows.data + row, rows.stride}, packed.data_ptr<BFloat16>(), gradient.size(0),
                    out.size(1), column, height, width, buffer);
      store_sums(buffer.sums, height, width, Rows<T>{to.at(row) + column, to.stride});
    }
    at::native::cpublas::brgemm_release();
  });
}

// gradient^T values to `out` in bf16, or added to it in fp32.
inline void weight_gradient(const at::Tensor& gradient, const at::Tensor& values, const at::Tensor& out) {
  for (const at::Tensor& x : {gradient, values, out}) {
    TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "weight_gradient: matrices of contiguous rows");
  }
  TORCH_CHECK(gradient.scalar_type() == at::kBFloat16 && values.scalar_type() == at::kBFloat16 &&
                  gradient.size(0) == values.size(0) && gradient.size(0) > 0 &&
                  out.size(0) == gradient.size(1) && out.size(1) == values.size(1) &&
                  values.size(1) % kLanes == 0,
              "weight_gradient: bf16 [N, M] and [N, K] for [M, K], K a multiple of 16");
  if (out.scalar_type() == at::kFloat) return fill_gradient<float>(gradient, values, out);
  TORCH_CHECK(out.scalar_type() == at::kBFloat16, "weight_gradient: out is bf16 or fp32");
  fill_gradient<BFloat16>(gradient, values, out);
}

}  // namespace alibi_lm
