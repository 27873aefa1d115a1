// SPDX-License-Identifier: Apache-2.0
// Every layer once more, slow and plain, in float or double: what tests compare
// the fast kernels with, and what finite differences check the gradients of.
// Shapes as in kernels/kernels.h; matrices are dense unless a stride is given.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "kernels/kernels.h"

namespace ballast::reference {

// Index of W(i, o) in its storage.
inline uint64_t WeightIndex(const LinearShape& s, uint64_t i, uint64_t o) {
  return s.out_major ? o * s.in + i : i * s.out + o;
}

template <typename T>
void Linear(const LinearShape& s, const T* x, const T* weight, const T* bias,
            T* y) {
  for (uint64_t r = 0; r < s.rows; ++r) {
    for (uint64_t o = 0; o < s.out; ++o) {
      T sum = bias != nullptr ? bias[o] : T{0};
      for (uint64_t i = 0; i < s.in; ++i) {
        sum += x[r * s.in + i] * weight[WeightIndex(s, i, o)];
      }
      y[r * s.out + o] = sum;
    }
  }
}

template <typename T>
void LinearGradInput(const LinearShape& s, const T* dy, const T* weight,
                     T* dx) {
  for (uint64_t r = 0; r < s.rows; ++r) {
    for (uint64_t i = 0; i < s.in; ++i) {
      T sum = 0;
      for (uint64_t o = 0; o < s.out; ++o) {
        sum += dy[r * s.out + o] * weight[WeightIndex(s, i, o)];
      }
      dx[r * s.in + i] = sum;
    }
  }
}

template <typename T>
void LinearGradWeight(const LinearShape& s, const T* x, const T* dy, T* dweight,
                      T* dbias) {
  for (uint64_t o = 0; o < s.out; ++o) {
    for (uint64_t i = 0; i < s.in; ++i) {
      T sum = 0;
      for (uint64_t r = 0; r < s.rows; ++r) {
        sum += x[r * s.in + i] * dy[r * s.out + o];
      }
      dweight[WeightIndex(s, i, o)] = sum;
    }
    if (dbias == nullptr) continue;
    dbias[o] = 0;
    for (uint64_t r = 0; r < s.rows; ++r) dbias[o] += dy[r * s.out + o];
  }
}

template <typename T>
void LayerNorm(uint64_t rows, uint64_t width, T epsilon, const T* x,
               const T* gamma, const T* beta, T* y, T* mean, T* rstd) {
  const T n = static_cast<T>(width);
  for (uint64_t r = 0; r < rows; ++r) {
    const T* row = x + r * width;
    T sum = 0;
    for (uint64_t i = 0; i < width; ++i) sum += row[i];
    mean[r] = sum / n;
    T squares = 0;
    for (uint64_t i = 0; i < width; ++i) {
      squares += (row[i] - mean[r]) * (row[i] - mean[r]);
    }
    rstd[r] = 1 / std::sqrt(squares / n + epsilon);
    for (uint64_t i = 0; i < width; ++i) {
      y[r * width + i] = (row[i] - mean[r]) * rstd[r] * gamma[i] + beta[i];
    }
  }
}

// dx_add may be null.
template <typename T>
void LayerNormGrad(uint64_t rows, uint64_t width, const T* x, const T* gamma,
                   const T* mean, const T* rstd, const T* dy, const T* dx_add,
                   T* dx, T* dgamma, T* dbeta) {
  const T n = static_cast<T>(width);
  std::fill_n(dgamma, width, T{0});
  std::fill_n(dbeta, width, T{0});
  for (uint64_t r = 0; r < rows; ++r) {
    const uint64_t at = r * width;
    T sum = 0;         // Of dy * gamma.
    T sum_scaled = 0;  // Of dy * gamma * normalised x.
    for (uint64_t i = 0; i < width; ++i) {
      const T normal = (x[at + i] - mean[r]) * rstd[r];
      dgamma[i] += dy[at + i] * normal;
      dbeta[i] += dy[at + i];
      sum += dy[at + i] * gamma[i];
      sum_scaled += dy[at + i] * gamma[i] * normal;
    }
    for (uint64_t i = 0; i < width; ++i) {
      const T normal = (x[at + i] - mean[r]) * rstd[r];
      const T through =
          rstd[r] * (dy[at + i] * gamma[i] - sum / n - normal * sum_scaled / n);
      dx[at + i] = through + (dx_add != nullptr ? dx_add[at + i] : T{0});
    }
  }
}

template <typename T>
T GeluTanh(T x) {
  const T root = std::sqrt(T{2} / std::numbers::pi_v<T>);
  return std::tanh(root * (x + T(0.044715) * x * x * x));
}

template <typename T>
T Gelu(T x) {
  return T(0.5) * x * (1 + GeluTanh(x));
}

template <typename T>
T GeluGrad(T x, T dy) {
  const T root = std::sqrt(T{2} / std::numbers::pi_v<T>);
  const T tanh = GeluTanh(x);
  const T inner = root * (1 + 3 * T(0.044715) * x * x);
  return dy * T(0.5) * (1 + tanh + x * (1 - tanh * tanh) * inner);
}

// The offset of head `head` of row `row` in a matrix of that stride.
inline uint64_t HeadAt(const AttentionShape& s, uint64_t stride, uint64_t row,
                       uint64_t head) {
  return row * stride + head * s.head_size;
}

// Calls visit(first_row, head, kv_head, query) for every row of scores; keys of
// that row are first_row .. first_row + query.
template <typename Visit>
void ForEachScoreRow(const AttentionShape& s, const Visit& visit) {
  for (uint64_t b = 0; b < s.batch; ++b) {
    for (uint64_t h = 0; h < s.heads; ++h) {
      for (uint64_t t = 0; t < s.tokens; ++t) {
        visit(b * s.tokens, h, h / (s.heads / s.kv_heads), t);
      }
    }
  }
}

template <typename T>
void Attention(const AttentionShape& s, const T* q, const T* k, const T* v,
               T* out, T* lse) {
  const T scale = 1 / std::sqrt(static_cast<T>(s.head_size));
  std::vector<T> score(s.tokens);
  ForEachScoreRow(s, [&](uint64_t row0, uint64_t h, uint64_t kh, uint64_t t) {
    const T* query = q + HeadAt(s, s.q_stride, row0 + t, h);
    for (uint64_t j = 0; j <= t; ++j) {
      const T* key = k + HeadAt(s, s.kv_stride, row0 + j, kh);
      score[j] = 0;
      for (uint64_t i = 0; i < s.head_size; ++i) score[j] += query[i] * key[i];
      score[j] *= scale;
    }
    const T top = *std::max_element(score.data(), score.data() + t + 1);
    T sum = 0;
    for (uint64_t j = 0; j <= t; ++j) sum += std::exp(score[j] - top);
    const T log_sum = top + std::log(sum);
    lse[(row0 / s.tokens * s.heads + h) * s.tokens + t] = log_sum;
    T* o = out + HeadAt(s, s.out_stride, row0 + t, h);
    std::fill_n(o, s.head_size, T{0});
    for (uint64_t j = 0; j <= t; ++j) {
      const T* value = v + HeadAt(s, s.kv_stride, row0 + j, kh);
      const T p = std::exp(score[j] - log_sum);
      for (uint64_t i = 0; i < s.head_size; ++i) o[i] += p * value[i];
    }
  });
}

// dq, dk and dv must be zero where no head writes; every head's part is
// overwritten.
template <typename T>
void AttentionGrad(const AttentionShape& s, const T* q, const T* k, const T* v,
                   const T* out, const T* lse, const T* dout, T* dq, T* dk,
                   T* dv) {
  const T scale = 1 / std::sqrt(static_cast<T>(s.head_size));
  for (uint64_t r = 0; r < s.batch * s.tokens; ++r) {
    std::fill_n(dq + r * s.q_stride, s.heads * s.head_size, T{0});
    std::fill_n(dk + r * s.kv_stride, s.kv_heads * s.head_size, T{0});
    std::fill_n(dv + r * s.kv_stride, s.kv_heads * s.head_size, T{0});
  }
  ForEachScoreRow(s, [&](uint64_t row0, uint64_t h, uint64_t kh, uint64_t t) {
    const uint64_t at_q = HeadAt(s, s.q_stride, row0 + t, h);
    const uint64_t at_o = HeadAt(s, s.out_stride, row0 + t, h);
    T mean_gradient = 0;  // Of the row's probabilities' gradients.
    for (uint64_t i = 0; i < s.head_size; ++i) {
      mean_gradient += out[at_o + i] * dout[at_o + i];
    }
    for (uint64_t j = 0; j <= t; ++j) {
      const uint64_t at_k = HeadAt(s, s.kv_stride, row0 + j, kh);
      T score = 0;
      T dp = 0;
      for (uint64_t i = 0; i < s.head_size; ++i) {
        score += q[at_q + i] * k[at_k + i];
        dp += dout[at_o + i] * v[at_k + i];
      }
      const uint64_t at_lse = (row0 / s.tokens * s.heads + h) * s.tokens + t;
      const T p = std::exp(score * scale - lse[at_lse]);
      const T ds = p * (dp - mean_gradient) * scale;
      for (uint64_t i = 0; i < s.head_size; ++i) {
        dv[at_k + i] += p * dout[at_o + i];
        dk[at_k + i] += ds * q[at_q + i];
        dq[at_q + i] += ds * k[at_k + i];
      }
    }
  });
}

// logits become the gradient of the returned sum when `with_grad`.
template <typename T>
double CrossEntropy(uint64_t rows, uint64_t vocab, const uint32_t* targets,
                    bool with_grad, T* logits) {
  double total = 0;
  for (uint64_t r = 0; r < rows; ++r) {
    T* row = logits + r * vocab;
    const T top = *std::max_element(row, row + vocab);
    T sum = 0;
    for (uint64_t i = 0; i < vocab; ++i) sum += std::exp(row[i] - top);
    total += static_cast<double>(std::log(sum) + top - row[targets[r]]);
    if (!with_grad) continue;
    for (uint64_t i = 0; i < vocab; ++i) {
      row[i] = std::exp(row[i] - top) / sum - (i == targets[r] ? T{1} : T{0});
    }
  }
  return total;
}

}  // namespace ballast::reference
