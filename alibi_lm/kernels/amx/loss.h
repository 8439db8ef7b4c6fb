// Cross entropy of bf16 logits, and its gradient in their place: each row is read from memory once.
#pragma once

#include <cmath>
#include <limits>

#include "lanes.h"

namespace alibi_lm {

// Loss in nats of one row; `logsumexp` is its log-sum-exp of base 2.
inline float row_loss(const BFloat16* logits, int64_t count, int64_t target, float* logsumexp) {
  __m512 maxima = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    maxima = _mm512_mask_max_ps(maxima, mask, maxima, load_bf16(logits + i, mask));
  }
  const float maximum = _mm512_reduce_max_ps(maxima);
  const __m512 scale = _mm512_set1_ps(kLog2E), zero = _mm512_set1_ps(maximum * kLog2E);
  __m512 sums = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 shares =
        exp2_lanes(_mm512_fmsub_ps(load_bf16(logits + i, mask), scale, zero));
    sums = _mm512_mask_add_ps(sums, mask, sums, shares);
  }
  const float log_sum = std::log2(_mm512_reduce_add_ps(sums));
  *logsumexp = maximum * kLog2E + log_sum;
  return target < 0 ? 0.0f : maximum - float(logits[target]) + log_sum * kLn2;
}

// factor x (softmax - one hot) of one row to `out`, which may be the row itself.
inline void row_gradient(const BFloat16* logits, int64_t count, int64_t target, float logsumexp,
                         float factor, BFloat16* out) {
  const float logit = target < 0 ? 0.0f : float(logits[target]);
  const __m512 scale = _mm512_set1_ps(kLog2E), zero = _mm512_set1_ps(logsumexp);
  const __m512 factors = _mm512_set1_ps(factor);
  for (int64_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 shares =
        exp2_lanes(_mm512_fmsub_ps(load_bf16(logits + i, mask), scale, zero));
    store_bf16(out + i, _mm512_mul_ps(shares, factors), mask);
  }
  if (target >= 0) {
    out[target] = BFloat16((std::exp2(logit * kLog2E - logsumexp) - 1.0f) * factor);
  }
}

}  // namespace alibi_lm
