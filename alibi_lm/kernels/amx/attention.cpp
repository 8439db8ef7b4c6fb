// Causal attention with linear biases in bf16 on CPUs with AMX: forward and backward.
//
// Scores are made transposed, [keys, 64 queries], in fp32 by AMX products. A query is a lane: maxima
// and sums of the softmax need no reduction across lanes, shares are written in the layout in which
// the next product reads them, and the bias -m(i - j) costs one multiplication of a distance that
// fp32 holds exactly. Softmax follows Milakov and Gimelshein 2018, the backward pass Dao et al. 2022
// (FlashAttention, algorithm 4).

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "backward.h"
#include "block_starts.h"
#include "forward.h"
#include "loss.h"
#include "weight_gradient.h"

namespace {

using namespace alibi_lm;
using at::Tensor;

constexpr int64_t kIgnored = -100;  // a target without loss

void check(const Tensor& q, const Tensor& k, const Tensor& v, at::ArrayRef<double> slopes) {
  for (const Tensor& x : {q, k, v}) {
    TORCH_CHECK(x.scalar_type() == at::kBFloat16 && x.dim() == 4 && x.stride(3) == 1,
                "attention wants bf16 of 4 dimensions whose last is contiguous");
    TORCH_CHECK(x.size(3) == q.size(3) && x.size(0) == q.size(0), "attention: shapes differ");
  }
  TORCH_CHECK(q.size(3) % 2 == 0 && k.sizes() == v.sizes() && q.size(1) % k.size(1) == 0 &&
                  q.size(2) <= k.size(2) && k.size(2) < (1 << 24),
              "attention: shapes that do not fit together");
  TORCH_CHECK(slopes.empty() || int64_t(slopes.size()) == q.size(1), "attention: number of slopes");
}

Bias bias_of(at::ArrayRef<double> slopes, int64_t head, int64_t width, int64_t window) {
  const double slope = slopes.empty() ? 0.0 : slopes[head];
  return {float(slope * kLog2E), float(kLog2E / std::sqrt(double(width))), window};
}

// [B, H, T, D] whose memory lies as [B, T, H, D], as that of views of one projection does.
Tensor empty_like_projection(const Tensor& like) {
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options())
      .transpose(1, 2);
}

const int32_t* starts_of(const std::optional<Tensor>& starts, int64_t head) {
  return starts ? starts->data_ptr<int32_t>() + head * starts->size(-1) : nullptr;
}

void check_starts(const std::optional<Tensor>& starts, const Tensor& q) {
  if (!starts) return;
  TORCH_CHECK(starts->scalar_type() == at::kInt && starts->is_contiguous() && starts->dim() == 3 &&
                  starts->size(0) == q.size(0) && starts->size(1) == q.size(1) &&
                  starts->size(2) == (q.size(2) + kQueries - 1) / kQueries,
              "attention: starts are int32 [B, H, blocks of 64 queries]");
}

Tensor find_starts(const Tensor& q, const Tensor& k, at::ArrayRef<double> slopes, double epsilon) {
  check(q, k, k, slopes);
  TORCH_CHECK(!slopes.empty() && epsilon > 0 && epsilon < 1, "attention: pruning needs slopes");
  const int64_t heads = q.size(1), length = q.size(2), group = heads / k.size(1);
  Tensor starts = at::empty({q.size(0), heads, (length + kQueries - 1) / kQueries},
                            q.options().dtype(at::kInt));
  at::parallel_for(0, q.size(0) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / heads, h = i % heads;
      head_starts(head_rows<const BFloat16>(q, b, h), length,
                  head_rows<const BFloat16>(k, b, h / group), k.size(2) - length, q.size(3),
                  slopes[h], epsilon, starts.data_ptr<int32_t>() + i * starts.size(2));
    }
  });
  return starts;
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   at::ArrayRef<double> slopes, int64_t window,
                                   const std::optional<Tensor>& starts) {
  check(q, k, v, slopes);
  check_starts(starts, q);
  const int64_t batch = q.size(0), heads = q.size(1), length = q.size(2), width = q.size(3);
  const int64_t kv_heads = k.size(1), num_keys = k.size(2), offset = num_keys - length;
  const int64_t padded = round_up(num_keys, kQueries), blocks = (length + 63) / kQueries;
  Tensor output = empty_like_projection(q);
  Tensor logsumexp = at::empty({batch, heads, length}, q.options().dtype(at::kFloat));
  Tensor columns = at::empty({batch, kv_heads, width, padded}, q.options());
  at::parallel_for(0, batch * kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      transpose_rows(head_rows<const BFloat16>(v, i / kv_heads, i % kv_heads), num_keys, padded,
                     width, columns.data_ptr<BFloat16>() + i * width * padded);
    }
  });
  at::parallel_for(0, batch * heads * blocks, 1, [&](int64_t begin, int64_t end) {
    const FlushTiny flush;
    ForwardBuffers buffer(width);
    for (int64_t i = begin; i < end; ++i) {
      // The last blocks are the longest: they go first, so that the threads end together.
      const int64_t head = i % (batch * heads), block = blocks - 1 - i / (batch * heads);
      const int64_t b = head / heads, h = head % heads, kv = h / (heads / kv_heads);
      const Bias bias = bias_of(slopes, h, width, window);
      int64_t start = starts ? starts_of(starts, head)[block] : 0;
      if (window > 0) start = std::max(start, offset + block * kQueries - window + 1);
      forward_block(head_rows<const BFloat16>(q, b, h), block * kQueries, length,
                    head_rows<const BFloat16>(k, b, kv), num_keys,
                    columns.data_ptr<BFloat16>() + (b * kv_heads + kv) * width * padded, padded,
                    width, offset, start / kQueries * kQueries, bias,
                    head_rows<BFloat16>(output, b, h),
                    logsumexp.data_ptr<float>() + head * length, buffer);
    }
    at::native::cpublas::brgemm_release();
  });
  return {output, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& gradient, const Tensor& q,
                                            const Tensor& k, const Tensor& v, const Tensor& output,
                                            const Tensor& logsumexp, at::ArrayRef<double> slopes,
                                            int64_t window, const std::optional<Tensor>& starts) {
  check(q, k, v, slopes);
  check_starts(starts, q);
  check(gradient, k, v, slopes);
  check(output, k, v, slopes);
  TORCH_CHECK(logsumexp.is_contiguous() && logsumexp.scalar_type() == at::kFloat);
  const int64_t batch = q.size(0), heads = q.size(1), length = q.size(2), width = q.size(3);
  const int64_t kv_heads = k.size(1), num_keys = k.size(2), group = heads / kv_heads;
  const float scale = float(1.0 / std::sqrt(double(width)));
  // Side by side, as the parts of one projection are: its gradient need not be put together.
  const int64_t beside = length == num_keys ? heads : 0;
  const Tensor whole =
      at::empty({batch, num_keys, beside + 2 * kv_heads, width}, q.options()).transpose(1, 2);
  Tensor dq = beside > 0 ? whole.narrow(1, 0, heads) : empty_like_projection(q);
  Tensor dk = whole.narrow(1, beside, kv_heads);
  Tensor dv = whole.narrow(1, beside + kv_heads, kv_heads);
  at::parallel_for(0, batch * kv_heads, 1, [&](int64_t begin, int64_t end) {
    const FlushTiny flush;
    BackwardBuffers buffer(length, num_keys, width);
    Buffer<float> sums(2 * num_keys * width);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / kv_heads, kv = i % kv_heads;
      float *d_keys = sums, *d_values = sums + num_keys * width;
      std::memset(d_keys, 0, sizeof(float) * 2 * num_keys * width);
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        const Head head{head_rows<const BFloat16>(q, b, h), head_rows<const BFloat16>(k, b, kv),
                        head_rows<const BFloat16>(v, b, kv),
                        head_rows<const BFloat16>(output, b, h),
                        head_rows<const BFloat16>(gradient, b, h),
                        logsumexp.data_ptr<float>() + (b * heads + h) * length,
                        head_rows<BFloat16>(dq, b, h), d_keys, d_values, length, num_keys, width,
                        num_keys - length, starts_of(starts, b * heads + h)};
        backward_head(head, buffer, bias_of(slopes, h, width, window), scale);
      }
      const Rows<BFloat16> key_out = head_rows<BFloat16>(dk, b, kv);
      const Rows<BFloat16> value_out = head_rows<BFloat16>(dv, b, kv);
      for (int64_t key = 0; key < num_keys; ++key) {
        for (int64_t column = 0; column < width; column += kLanes) {
          const __mmask16 mask = first_lanes(width - column);
          const __m512 d_key = _mm512_maskz_loadu_ps(mask, d_keys + key * width + column);
          const __m512 d_value = _mm512_maskz_loadu_ps(mask, d_values + key * width + column);
          store_bf16(key_out.at(key) + column, _mm512_mul_ps(d_key, _mm512_set1_ps(scale)), mask);
          store_bf16(value_out.at(key) + column, d_value, mask);
        }
      }
    }
    at::native::cpublas::brgemm_release();
  });
  return {dq, dk, dv};
}

void check_rows(const Tensor& logits, const Tensor& targets, const Tensor& losses) {
  TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous() && logits.scalar_type() == at::kBFloat16,
              "loss: logits are bf16 [N, V]");
  TORCH_CHECK(targets.is_contiguous() && targets.scalar_type() == at::kLong &&
                  losses.is_contiguous() && losses.scalar_type() == at::kFloat &&
                  targets.numel() == logits.size(0) && losses.numel() == logits.size(0),
              "loss: one int64 target and one fp32 number a row");
  const int64_t* target = targets.data_ptr<int64_t>();
  for (int64_t i = 0; i < targets.numel(); ++i) {
    TORCH_CHECK_INDEX(target[i] < logits.size(1) && (target[i] >= 0 || target[i] == kIgnored),
                      "Target ", target[i], " is out of bounds.");
  }
}

Tensor loss_forward(const Tensor& logits, const Tensor& targets, const Tensor& losses) {
  check_rows(logits, targets, losses);
  Tensor logsumexp = at::empty_like(losses);
  const int64_t count = logits.size(1);
  at::parallel_for(0, logits.size(0), 16, [&](int64_t begin, int64_t end) {
    const FlushTiny flush;
    for (int64_t i = begin; i < end; ++i) {
      losses.data_ptr<float>()[i] =
          row_loss(logits.data_ptr<BFloat16>() + i * count, count, targets.data_ptr<int64_t>()[i],
                   logsumexp.data_ptr<float>() + i);
    }
  });
  return logsumexp;
}

void loss_backward(const Tensor& logits, const Tensor& targets, const Tensor& logsumexp,
                   const Tensor& factors, const Tensor& out) {
  check_rows(logits, targets, factors);
  check_rows(out, targets, factors);
  check_rows(logits, targets, logsumexp);
  const int64_t count = logits.size(1);
  at::parallel_for(0, logits.size(0), 16, [&](int64_t begin, int64_t end) {
    const FlushTiny flush;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t target = targets.data_ptr<int64_t>()[i];
      row_gradient(logits.data_ptr<BFloat16>() + i * count, count, target,
                   logsumexp.data_ptr<float>()[i],
                   target == kIgnored ? 0.0f : factors.data_ptr<float>()[i],
                   out.data_ptr<BFloat16>() + i * count);
    }
  });
}

}  // namespace

TORCH_LIBRARY(alibi_lm, library) {
  library.def("attention_forward(Tensor q, Tensor k, Tensor v, float[] slopes, int window,"
              " Tensor? starts) -> (Tensor, Tensor)");
  library.def("attention_starts(Tensor q, Tensor k, float[] slopes, float epsilon) -> Tensor");
  library.def("attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor output,"
              " Tensor logsumexp, float[] slopes, int window, Tensor? starts)"
              " -> (Tensor, Tensor, Tensor)");
  library.def("weight_gradient(Tensor gradient, Tensor values, Tensor(a!) out) -> ()");
  library.def("loss_forward(Tensor logits, Tensor targets, Tensor(a!) losses) -> Tensor");
  library.def("loss_backward(Tensor logits, Tensor targets, Tensor logsumexp, Tensor factors,"
              " Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(alibi_lm, CPU, library) {
  library.impl("attention_forward", forward);
  library.impl("attention_starts", find_starts);
  library.impl("attention_backward", backward);
  library.impl("weight_gradient", weight_gradient);
  library.impl("loss_forward", loss_forward);
  library.impl("loss_backward", loss_backward);
}
