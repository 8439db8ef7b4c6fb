// What both passes share: sizes of blocks, vectors of 16 fp32 lanes, and packed operands.
#pragma once

#include <ATen/ATen.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace alibi_lm {

using at::BFloat16;

constexpr int64_t kLanes = 16;
constexpr int64_t kQueries = 64;  // of a block: the width of a packed operand of a product
constexpr int64_t kKeys = 256;    // of a block
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// While it exists, this thread takes numbers below 1.2e-38 for 0. Distant keys' shares times small
// gradients are such numbers, and each costs a processor some hundred cycles otherwise.
struct FlushTiny {
  FlushTiny() : saved(_mm_getcsr()) { _mm_setcsr(saved | 0x8040); }  // flush results, and operands
  ~FlushTiny() { _mm_setcsr(saved); }
  FlushTiny(const FlushTiny&) = delete;
  FlushTiny& operator=(const FlushTiny&) = delete;
  unsigned saved;
};

// A buffer that starts on a cache line.
template <typename T>
struct Buffer {
  explicit Buffer(int64_t count)
      : data(static_cast<T*>(std::aligned_alloc(
            64, round_up(std::max<int64_t>(count, 1) * int64_t(sizeof(T)), 64)))) {
    TORCH_CHECK(data != nullptr, "attention: out of memory");
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator T*() const { return data; }
  T* data;
};

// The rows of one head: [length, width] with any distance between rows, neighbors side by side.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;
  T* at(int64_t row) const { return data + row * stride; }
};

template <typename T>
Rows<T> head_rows(const at::Tensor& tensor, int64_t batch, int64_t head) {
  return {tensor.data_ptr<std::remove_const_t<T>>() + batch * tensor.stride(0) + head * tensor.stride(1),
          tensor.stride(2)};
}

// 2^x with a relative error below 2e-7; 0 where that would be subnormal, NaN for NaN.
// The polynomial is the minimax one of degree 5 on [-1/2, 1/2].
inline __m512 exp2_lanes(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);  // of a NaN, the second operand is returned
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(0.0013276470126584172f);
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.009675540961325169f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.05550713464617729f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.24022120237350464f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.6931469440460205f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0000001192092896f));
  return _mm512_maskz_scalef_ps(normal, sum, whole);
}

// The first `count` of 16 lanes, none of a negative count.
inline __mmask16 first_lanes(int64_t count) {
  return __mmask16((1u << std::clamp<int64_t>(count, 0, kLanes)) - 1);
}

inline __m512i load_halves(const BFloat16* in, __mmask16 mask) {  // one in each lane's lower half
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, in));
}

inline __m512 load_bf16(const BFloat16* in, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(load_halves(in, mask), 16));
}

inline void store_bf16(BFloat16* out, __m512 values, __mmask16 mask = 0xffff) {
  _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

inline void store_halves(BFloat16* out, __m512i even, __m512i odd, __mmask16 mask) {
  _mm512_mask_storeu_epi32(out, mask, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
}

// Two rows, 16 columns of each, as pairs: the layout of a product's second operand.
inline void store_pairs(BFloat16* out, __m512 even, __m512 odd) {
  store_halves(out, _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even)),
               _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd)), 0xffff);
}

// Two neighboring columns of 16 rows as pairs, 0 in rows from `count` on.
inline __m512i gather_pairs(Rows<const BFloat16> rows, int64_t count, int64_t column) {
  const __m512i index =
      _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_epi32(int(rows.stride * sizeof(BFloat16))));
  return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), first_lanes(count), index,
                                     rows.data + column, 1);
}

// rows [count, width] to out [width / 2][64][2]: the second operand of a product with rows^T.
inline void pack_transposed(Rows<const BFloat16> rows, int64_t count, int64_t width,
                            BFloat16* out) {
  for (int64_t first = 0; first < kQueries; first += kLanes) {
    const Rows<const BFloat16> part{rows.at(first), rows.stride};
    for (int64_t column = 0; column < width; column += 2) {
      _mm512_storeu_si512(out + column * kQueries + 2 * first,
                          gather_pairs(part, count - first, column));
    }
  }
}

// A cache line of a row, 32 columns; 0 from `width` on, and all of it where there is no such row.
inline __m512i load_line(Rows<const BFloat16> rows, int64_t row, int64_t count, int64_t column,
                         int64_t width) {
  const int64_t left = row < count ? std::clamp<int64_t>(width - column, 0, 32) : 0;
  return _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << left) - 1), rows.at(row) + column);
}

// Columns [0, 16) and [16, 32) of two lines as pairs.
inline __m512i low_pairs(__m512i even, __m512i odd) {
  const __m512i a = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(even));
  const __m512i b = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(odd));
  return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

inline __m512i high_pairs(__m512i even, __m512i odd) {
  const __m512i a = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(even, 1));
  const __m512i b = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(odd, 1));
  return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

// rows [count, width] to out [panels of 64 columns][padded / 2][panel width][2]: the second operand of a
// product with rows. Rows from `count` to `padded`, an even number, are 0.
inline void pack_rows(Rows<const BFloat16> rows, int64_t count, int64_t padded, int64_t width,
                      BFloat16* out) {
  for (int64_t row = 0; row < padded; row += 2) {
    for (int64_t column = 0; column < width; column += 2 * kLanes) {
      const int64_t panel = column / kQueries * kQueries;
      const int64_t panel_width = std::min(kQueries, width - panel), left = width - column;
      BFloat16* to = out + panel * padded + row * panel_width + 2 * (column - panel);
      const __m512i even = load_line(rows, row, count, column, width);
      const __m512i odd = load_line(rows, row + 1, count, column, width);
      _mm512_mask_storeu_epi32(to, first_lanes(left), low_pairs(even, odd));
      _mm512_mask_storeu_epi32(to + 2 * kLanes, first_lanes(left - kLanes), high_pairs(even, odd));
    }
  }
}

// 16 rows of 16 to 16 columns, in place.
inline void transpose_lanes(__m512* rows) {
  __m512 step[16];
  for (int i = 0; i < 16; i += 2) {
    step[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    step[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  const auto low = [](__m512 a, __m512 b) { return _mm512_shuffle_ps(a, b, 0x44); };
  const auto high = [](__m512 a, __m512 b) { return _mm512_shuffle_ps(a, b, 0xee); };
  for (int i = 0; i < 16; i += 4) {
    rows[i] = low(step[i], step[i + 2]);
    rows[i + 1] = high(step[i], step[i + 2]);
    rows[i + 2] = low(step[i + 1], step[i + 3]);
    rows[i + 3] = high(step[i + 1], step[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // quarters of 128 bits: those of rows i, i + 4, i + 8, i + 12
    const __m512 a = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0xdd);
    step[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    step[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    step[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    step[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 16; ++i) rows[i] = step[i];
}

// rows [count, width] to out [width][padded], the first operand of a product with rows^T; rows from
// `count` to `padded`, a multiple of 32, are 0.
inline void transpose_rows(Rows<const BFloat16> rows, int64_t count, int64_t padded, int64_t width,
                           BFloat16* out) {
  for (int64_t first = 0; first < padded; first += 2 * kLanes) {
    // Each line is read once: rows that lie a power of two apart share few places in a cache.
    for (int64_t column = 0; column < width; column += 2 * kLanes) {
      __m512 low[16], high[16];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t row = first + 2 * i;
        const __m512i even = load_line(rows, row, count, column, width);
        const __m512i odd = load_line(rows, row + 1, count, column, width);
        low[i] = _mm512_castsi512_ps(low_pairs(even, odd));
        high[i] = _mm512_castsi512_ps(high_pairs(even, odd));
      }
      transpose_lanes(low);
      transpose_lanes(high);
      BFloat16* to = out + column * padded + first;
      for (int64_t i = 0; i < std::min(kLanes, width - column); ++i) {
        _mm512_storeu_ps(reinterpret_cast<float*>(to + i * padded), low[i]);
      }
      for (int64_t i = kLanes; i < std::min(2 * kLanes, width - column); ++i) {
        _mm512_storeu_ps(reinterpret_cast<float*>(to + i * padded), high[i - kLanes]);
      }
    }
  }
}

// columns [width][64] times a factor for each of the 64, to the first `count` rows of out.
inline void store_transposed(const float* columns, const float* factors, int64_t count,
                             int64_t width, Rows<BFloat16> out) {
  for (int64_t first = 0; first < count; first += kLanes) {
    const __m512 factor = _mm512_loadu_ps(factors + first);
    for (int64_t column = 0; column < width; column += kLanes) {
      __m512 block[16];
      for (int64_t i = 0; i < kLanes; ++i) {
        block[i] = _mm512_setzero_ps();
        if (column + i < width) {
          const float* from = columns + (column + i) * kQueries + first;
          block[i] = _mm512_mul_ps(_mm512_loadu_ps(from), factor);
        }
      }
      transpose_lanes(block);
      for (int64_t i = 0; i < kLanes && first + i < count; ++i) {
        store_bf16(out.at(first + i) + column, block[i], first_lanes(width - column));
      }
    }
  }
}

// The keys [first, end) that the queries of a block may read, and what each pair of them adds.
struct Bias {
  float slope;     // times log2(e)
  float scale;     // of the products, times log2(e)
  int64_t window;  // keys that a query sees, or 0 for all before it

  __m512 distances(int64_t query, int64_t key) const {
    const __m512i lanes =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(int(query - key))));
  }
  __mmask16 seen(__m512 distance) const {
    __mmask16 mask = _mm512_cmp_ps_mask(distance, _mm512_setzero_ps(), _CMP_GE_OQ);
    if (window > 0) {
      mask &= _mm512_cmp_ps_mask(distance, _mm512_set1_ps(float(window)), _CMP_LT_OQ);
    }
    return mask;
  }
  // Whether some query of the block does not see some key of [first, end).
  bool masks(int64_t query, int64_t first, int64_t end) const {
    return end - 1 > query || (window > 0 && query + kQueries - 1 - first >= window);
  }
  __m512 apply(__m512 products, __m512 distance) const {
    const __m512 penalty = _mm512_mul_ps(distance, _mm512_set1_ps(slope));
    return _mm512_fmsub_ps(products, _mm512_set1_ps(scale), penalty);
  }
};

}  // namespace alibi_lm
