// How far back each block of queries must read, from norms alone.
#pragma once

#include <cmath>
#include <limits>

#include "lanes.h"

namespace alibi_lm {

constexpr double kRounding = 0x1p-23;  // unit roundoff of fp32, doubled
constexpr double kSlack = 1e-3;        // what exponentials and sums may err in a log-probability

inline float dot_rows(const BFloat16* a, const BFloat16* b, int64_t width) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += kLanes) {
    const __mmask16 mask = first_lanes(width - i);
    sum = _mm512_fmadd_ps(load_bf16(a + i, mask), load_bf16(b + i, mask), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

// An upper bound of a row's length, whatever the sum's rounding.
inline double length_bound(const BFloat16* row, int64_t width) {
  return std::sqrt(double(dot_rows(row, row, width))) * (1 + (width + 8) * kRounding);
}

// The first key that each block of queries of one head must read, so that each row leaves out at
// most epsilon of its probability.
//
// Keys before n, at distances above i - n, have together at most
//     e^(b - lse - m(i - n + 1)) / (1 - e^-m)
// of row i, with b = |q_i| max|k| / sqrt(D) over the keys before the block, and the row's log-sum-exp
// lse at least its score of its own key, q_i.k_i / sqrt(D), where the bias is 0. Solved for n. What is
// rounded is moved to the safe side; what is not finite reads everything.
inline void head_starts(Rows<const BFloat16> queries, int64_t num_queries,
                        Rows<const BFloat16> keys, int64_t offset, int64_t width, double slope,
                        double epsilon, int32_t* starts) {
  const double scale = 1.0 / std::sqrt(double(width));
  const double room = std::log(epsilon) + std::log(-std::expm1(-slope));
  double longest = 0.0;  // of the keys before the block
  bool finite = true;
  int64_t known = 0;
  for (int64_t block = 0; block < num_queries; block += kQueries) {
    const int64_t position = offset + block;
    for (; known < position; ++known) {
      const double length = length_bound(keys.at(known), width);
      finite = finite && std::isfinite(length);
      longest = std::max(longest, length);
    }
    double worst = -std::numeric_limits<double>::infinity();
    const int64_t end = std::min(block + kQueries, num_queries);
    for (int64_t query = block; query < end; ++query) {
      const double length = length_bound(queries.at(query), width);
      const BFloat16* own_key = keys.at(offset + query);
      const double own = dot_rows(queries.at(query), own_key, width);
      const double own_length = length_bound(own_key, width);
      const double error = 3 * (width + 8) * kRounding * length * std::max(longest, own_length);
      const double excess = (length * longest - own + error) * scale + kSlack;
      finite = finite && std::isfinite(excess);
      worst = std::max(worst, excess - slope * double(offset + query));
    }
    const double first = 1 + std::floor((room - worst) / slope);
    const bool bounded = finite && first > 0;
    starts[block / kQueries] = bounded ? int32_t(std::min(first, double(position))) : 0;
  }
}

}  // namespace alibi_lm
