// The forward pass of one block of queries of one head.
#pragma once

#include <ATen/native/CPUBlas.h>

#include "lanes.h"

namespace alibi_lm {

using at::native::cpublas::brgemm;

constexpr float kNoMaximum = -1e30f;  // finite, so that the difference of two is not NaN

struct ForwardBuffers {
  ForwardBuffers(int64_t width)
      : queries(width * kQueries), scores(kKeys * kQueries), shares(kKeys * kQueries),
        output(width * kQueries) {}
  Buffer<BFloat16> queries;  // [width / 2][64][2]
  Buffer<float> scores;      // [keys][64]
  Buffer<BFloat16> shares;   // [keys / 2][64][2]
  Buffer<float> output;      // [width][64]
};

// Scores to numbers of base 2; the maxima over them of 16 queries.
inline __m512 bias_lanes(float* scores, int64_t rows, const Bias& bias, int64_t query, int64_t key,
                         bool masked, __m512 maximum) {
  const __m512 unseen = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 distance = bias.distances(query, key);
  for (int64_t row = 0; row < rows; ++row) {
    __m512 value = bias.apply(_mm512_loadu_ps(scores + row * kQueries), distance);
    if (masked) value = _mm512_mask_mov_ps(unseen, bias.seen(distance), value);
    _mm512_storeu_ps(scores + row * kQueries, value);
    maximum = _mm512_max_ps(maximum, value);
    distance = _mm512_sub_ps(distance, _mm512_set1_ps(1.0f));
  }
  return maximum;
}

// Shares of 16 queries before division by their sums, as pairs of keys; returns the sums.
inline __m512 share_lanes(const float* scores, int64_t rows, __m512 maximum, BFloat16* shares) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t row = 0; row < round_up(rows, kQueries); row += 2) {
    __m512 pair[2];
    for (int64_t odd = 0; odd < 2; ++odd) {
      pair[odd] = _mm512_setzero_ps();
      if (row + odd < rows) {
        const __m512 value = _mm512_loadu_ps(scores + (row + odd) * kQueries);
        pair[odd] = exp2_lanes(_mm512_sub_ps(value, maximum));
        sum = _mm512_add_ps(sum, pair[odd]);
      }
    }
    store_pairs(shares + row * kQueries, pair[0], pair[1]);
  }
  return sum;
}

// Outputs of 64 queries from `first` on, and the log-sum-exp of each.
//
// keys: the head's rows; values: [width][padded], its rows transposed; offset: the position of
// query 0; start: the first key that is read.
inline void forward_block(Rows<const BFloat16> queries, int64_t first, int64_t num_queries,
                          Rows<const BFloat16> keys, int64_t num_keys, const BFloat16* values,
                          int64_t padded, int64_t width, int64_t offset, int64_t start,
                          const Bias& bias, Rows<BFloat16> output, float* logsumexp,
                          ForwardBuffers& buffer) {
  const int64_t count = std::min(kQueries, num_queries - first);
  const int64_t position = offset + first;
  const int64_t end = std::min(num_keys, position + count);
  pack_transposed({queries.at(first), queries.stride}, count, width, buffer.queries);
  std::memset(buffer.output, 0, sizeof(float) * width * kQueries);
  __m512 maxima[4], sums[4];
  for (int64_t lane = 0; lane < 4; ++lane) {
    maxima[lane] = _mm512_set1_ps(kNoMaximum);
    sums[lane] = _mm512_setzero_ps();
  }
  for (int64_t key = start; key < end; key += kKeys) {
    const int64_t rows = std::min(kKeys, end - key);
    brgemm(rows, kQueries, width, keys.stride, kQueries, kQueries, false, keys.at(key),
           buffer.queries, buffer.scores);
    const bool masked = bias.masks(position, key, key + rows);
    for (int64_t lane = 0; lane < 4; ++lane) {
      float* scores = buffer.scores + lane * kLanes;
      const __m512 maximum = bias_lanes(scores, rows, bias, position + lane * kLanes, key, masked,
                                        maxima[lane]);
      const __m512 shrink = exp2_lanes(_mm512_sub_ps(maxima[lane], maximum));
      const __m512 sum =
          share_lanes(scores, rows, maximum, buffer.shares + 2 * lane * kLanes);
      sums[lane] = _mm512_fmadd_ps(sums[lane], shrink, sum);
      if (_mm512_cmp_ps_mask(maxima[lane], maximum, _CMP_NEQ_UQ) && key > start) {
        for (int64_t column = 0; column < width; ++column) {
          float* out = buffer.output + column * kQueries + lane * kLanes;
          _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(out), shrink));
        }
      }
      maxima[lane] = maximum;
    }
    brgemm(width, kQueries, round_up(rows, kQueries), padded, kQueries, kQueries, true,
           values + key, buffer.shares, buffer.output);
  }
  alignas(64) float inverse[kQueries], total[kQueries], highest[kQueries];
  for (int64_t lane = 0; lane < 4; ++lane) {
    const __m512 one = _mm512_set1_ps(1.0f);
    _mm512_store_ps(inverse + lane * kLanes, _mm512_div_ps(one, sums[lane]));
    _mm512_store_ps(total + lane * kLanes, sums[lane]);
    _mm512_store_ps(highest + lane * kLanes, maxima[lane]);
  }
  store_transposed(buffer.output, inverse, count, width, {output.at(first), output.stride});
  for (int64_t query = 0; query < count; ++query) {
    logsumexp[first + query] = kLn2 * highest[query] + std::log(total[query]);
  }
}

}  // namespace alibi_lm
