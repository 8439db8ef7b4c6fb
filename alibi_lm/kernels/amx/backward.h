// The backward pass of one head.
#pragma once

#include <ATen/native/CPUBlas.h>

#include "lanes.h"

namespace alibi_lm {

using at::native::cpublas::brgemm;

struct BackwardBuffers {
  BackwardBuffers(int64_t num_queries, int64_t num_keys, int64_t width)
      : padded(round_up(num_queries, kQueries)), columns(padded * width), gradient_columns(padded * width),
        rows(padded * width), gradient_rows(padded * width), logs(padded), deltas(padded),
        d_queries(padded * width), keys(kKeys * width), scores(kKeys * kQueries),
        products(kKeys * kQueries), shares(kKeys * kQueries), d_scores(kKeys * kQueries),
        d_pairs(kKeys * kQueries) {}
  int64_t padded;
  Buffer<BFloat16> columns;           // blocks of q^T: [width / 2][64][2]
  Buffer<BFloat16> gradient_columns;  // of the output's gradient^T
  Buffer<BFloat16> rows;              // blocks of q: [panels][32][panel width][2]
  Buffer<BFloat16> gradient_rows;     // of the output's gradient
  Buffer<float> logs;                 // log-sum-exp of each query, base 2
  Buffer<float> deltas;               // gradient . output of each query
  Buffer<float> d_queries;            // blocks of dq^T: [width][64]
  Buffer<BFloat16> keys;              // a block of k^T: [width][keys]
  Buffer<float> scores;               // [keys][64]
  Buffer<float> products;             // values . gradient, likewise
  Buffer<BFloat16> shares;            // [keys][64]
  Buffer<BFloat16> d_scores;          // [keys][64]
  Buffer<BFloat16> d_pairs;           // [keys / 2][64][2]
};

// One head's tensors; gradients of keys and values are added to [num_keys, width] in fp32.
struct Head {
  Rows<const BFloat16> queries, keys, values, output, gradient;
  const float* logsumexp;
  Rows<BFloat16> d_queries;
  float* d_keys;
  float* d_values;
  int64_t num_queries, num_keys, width, offset;
  const int32_t* starts;  // first key of each block of queries, or null
};

inline void pack_head(const Head& head, BackwardBuffers& buffer) {
  const int64_t width = head.width;
  for (int64_t first = 0; first < head.num_queries; first += kQueries) {
    const int64_t count = std::min(kQueries, head.num_queries - first);
    const Rows<const BFloat16> queries{head.queries.at(first), head.queries.stride};
    const Rows<const BFloat16> gradient{head.gradient.at(first), head.gradient.stride};
    pack_transposed(queries, count, width, buffer.columns + first * width);
    pack_transposed(gradient, count, width, buffer.gradient_columns + first * width);
    pack_rows(queries, count, kQueries, width, buffer.rows + first * width);
    pack_rows(gradient, count, kQueries, width, buffer.gradient_rows + first * width);
  }
  for (int64_t query = 0; query < buffer.padded; ++query) {
    __m512 delta = _mm512_setzero_ps();
    for (int64_t i = 0; query < head.num_queries && i < width; i += kLanes) {
      const __mmask16 mask = first_lanes(width - i);
      delta = _mm512_fmadd_ps(load_bf16(head.output.at(query) + i, mask),
                              load_bf16(head.gradient.at(query) + i, mask), delta);
    }
    buffer.deltas[query] = _mm512_reduce_add_ps(delta);
    buffer.logs[query] = query < head.num_queries ? kLog2E * head.logsumexp[query] : 0.0f;
  }
  std::memset(buffer.d_queries, 0, sizeof(float) * buffer.padded * width);
}

// Shares and gradients of the scores of 16 queries, `rows` keys.
inline void gradient_lanes(BackwardBuffers& buffer, int64_t lane, int64_t rows, int64_t block,
                           const Bias& bias, int64_t query, int64_t key, bool masked) {
  const __m512 log = _mm512_load_ps(buffer.logs + block + lane * kLanes);
  const __m512 delta = _mm512_load_ps(buffer.deltas + block + lane * kLanes);
  __m512 distance = bias.distances(query + lane * kLanes, key);
  for (int64_t row = 0; row < round_up(rows, kQueries); row += 2) {
    __m512 pair[2];
    for (int64_t odd = 0; odd < 2; ++odd) {
      pair[odd] = _mm512_setzero_ps();
      if (row + odd >= rows) continue;
      const int64_t place = (row + odd) * kQueries + lane * kLanes;
      const __m512 score = bias.apply(_mm512_load_ps(buffer.scores + place), distance);
      __m512 share = exp2_lanes(_mm512_sub_ps(score, log));
      if (masked) share = _mm512_maskz_mov_ps(bias.seen(distance), share);
      pair[odd] = _mm512_mul_ps(share, _mm512_sub_ps(_mm512_load_ps(buffer.products + place),
                                                     delta));
      store_bf16(buffer.shares + place, share);
      store_bf16(buffer.d_scores + place, pair[odd]);
      distance = _mm512_sub_ps(distance, _mm512_set1_ps(1.0f));
    }
    store_pairs(buffer.d_pairs + row * kQueries + 2 * lane * kLanes, pair[0], pair[1]);
  }
}

// What the keys [key, key + rows) and one block of queries give each other.
inline void backward_block(const Head& head, BackwardBuffers& buffer, const Bias& bias,
                           int64_t block, int64_t key, int64_t rows, const BFloat16* keys_columns,
                           int64_t columns_stride) {
  const int64_t width = head.width, position = head.offset + block;
  brgemm(rows, kQueries, width, head.keys.stride, kQueries, kQueries, false, head.keys.at(key),
         buffer.columns + block * width, buffer.scores);
  brgemm(rows, kQueries, width, head.values.stride, kQueries, kQueries, false,
         head.values.at(key), buffer.gradient_columns + block * width, buffer.products);
  const bool masked = bias.masks(position, key, key + rows);
  for (int64_t lane = 0; lane < 4; ++lane) {
    gradient_lanes(buffer, lane, rows, block, bias, position, key, masked);
  }
  for (int64_t column = 0; column < width; column += kQueries) {
    const int64_t panel = std::min(kQueries, width - column);
    const int64_t packed = block * width + column * kQueries;
    brgemm(rows, panel, kQueries, kQueries, panel, width, true, buffer.shares,
           buffer.gradient_rows + packed, head.d_values + key * width + column);
    brgemm(rows, panel, kQueries, kQueries, panel, width, true, buffer.d_scores,
           buffer.rows + packed, head.d_keys + key * width + column);
  }
  brgemm(width, kQueries, round_up(rows, kQueries), columns_stride, kQueries, kQueries, true,
         keys_columns, buffer.d_pairs, buffer.d_queries + block * width);
}

inline void backward_head(const Head& head, BackwardBuffers& buffer, const Bias& bias,
                          float scale) {
  pack_head(head, buffer);
  const int64_t width = head.width;
  for (int64_t key = 0; key < head.num_keys; key += kKeys) {
    const int64_t end = std::min(key + kKeys, head.num_keys);
    const int64_t stride = round_up(end - key, kQueries);
    transpose_rows({head.keys.at(key), head.keys.stride}, end - key, stride, width, buffer.keys);
    const int64_t nearest = std::max<int64_t>(0, key - head.offset) / kQueries * kQueries;
    for (int64_t block = nearest; block < head.num_queries; block += kQueries) {
      const int64_t count = std::min(kQueries, head.num_queries - block);
      int64_t low = head.starts == nullptr ? 0 : head.starts[block / kQueries];
      if (bias.window > 0) low = std::max(low, head.offset + block - bias.window + 1);
      low = std::max(key, low / kQueries * kQueries);
      const int64_t high = std::min(end, head.offset + block + count);
      if (low >= high) continue;
      backward_block(head, buffer, bias, block, low, high - low, buffer.keys + (low - key), stride);
    }
  }
  alignas(64) float scales[kQueries];
  std::fill(scales, scales + kQueries, scale);
  for (int64_t block = 0; block < head.num_queries; block += kQueries) {
    store_transposed(buffer.d_queries + block * width, scales,
                     std::min(kQueries, head.num_queries - block), width,
                     {head.d_queries.at(block), head.d_queries.stride});
  }
}

}  // namespace alibi_lm
