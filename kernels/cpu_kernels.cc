// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu_kernels.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/check.h"
#include "hwy/targets.h"
#include "kernels/attention_simd.h"
#include "kernels/layers_simd.h"
#include "kernels/matrix_product.h"
#include "kernels/task_pool.h"
#include "kernels/update.h"

namespace ballast {
namespace {

// Pieces of element-wise work: long enough to outweigh handing them out, short
// enough to share evenly.
constexpr uint64_t kPieceElems = uint64_t{16} * 1024;
// Rows of one task. Sums over rows are taken of such parts first: a part is
// read in order, which columns of the whole are not.
constexpr uint64_t kPartRows = 32;
// Columns summed by one task: whole cache lines, of whole pages at best.
constexpr uint64_t kSumColumns = 64;
// Parts of the vocabulary that are scattered to at once.
constexpr uint64_t kScatterParts = 64;

class CpuKernels final : public Kernels {
 public:
  explicit CpuKernels(int threads) : pool_(threads), products_(&pool_) {}

  std::string Identity() const override {
    // The best target is the lowest bit.
    const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
    return absl::StrCat(MatrixProducts::Identity(), ", layers with ",
                        hwy::TargetName(targets & -targets));
  }

  uint64_t LinearScratchBytes(const LinearShape& shape) override {
    return products_.ScratchBytes(LinearProduct::kForward, shape);
  }

  void Linear(const LinearShape& shape, const float* x, const void* weight,
              const float* bias, float* y, void* scratch) override {
    products_.Run(LinearProduct::kForward, shape, x, weight, bias, y, scratch);
  }

  uint64_t LinearGradInputScratchBytes(const LinearShape& shape) override {
    return products_.ScratchBytes(LinearProduct::kGradInput, shape);
  }

  void LinearGradInput(const LinearShape& shape, const float* dy,
                       const void* weight, float* dx, void* scratch) override {
    products_.Run(LinearProduct::kGradInput, shape, dy, weight, nullptr, dx,
                  scratch);
  }

  uint64_t LinearGradWeightScratchBytes(const LinearShape& shape) override {
    return std::max(products_.ScratchBytes(LinearProduct::kGradWeight, shape),
                    Parts(shape.rows) * shape.out * sizeof(float));
  }

  void LinearGradWeight(const LinearShape& shape, const float* x,
                        const float* dy, float* dweight, float* dbias,
                        void* scratch) override {
    if (dbias != nullptr) {
      auto* const parts = static_cast<float*>(scratch);
      pool_.RunPieces(shape.rows, kPartRows, [&](uint64_t begin, uint64_t end) {
        ColumnSums(end - begin, shape.out, shape.out, dy + begin * shape.out,
                   parts + begin / kPartRows * shape.out);
      });
      SumParts(shape.rows, shape.out, parts, dbias);
    }
    products_.Run(LinearProduct::kGradWeight, shape, x, dy, nullptr, dweight,
                  scratch);
  }

  void LayerNorm(uint64_t rows, uint64_t width, float epsilon, const float* x,
                 const float* gamma, const float* beta, float* y, float* mean,
                 float* rstd) override {
    pool_.RunPieces(rows, kPartRows, [&](uint64_t begin, uint64_t end) {
      const uint64_t at = begin * width;
      LayerNormRows(end - begin, width, epsilon, x + at, gamma, beta, y + at,
                    mean + begin, rstd + begin);
    });
  }

  uint64_t LayerNormGradScratchBytes(uint64_t rows, uint64_t width) override {
    return 2 * Parts(rows) * width * sizeof(float);
  }

  void LayerNormGrad(uint64_t rows, uint64_t width, const float* x,
                     const float* gamma, const float* mean, const float* rstd,
                     const float* dy, const float* dx_add, float* dx,
                     float* dgamma, float* dbeta, void* scratch) override {
    auto* const gammas = static_cast<float*>(scratch);
    float* const betas = gammas + Parts(rows) * width;
    pool_.RunPieces(rows, kPartRows, [&](uint64_t begin, uint64_t end) {
      const uint64_t at = begin * width;
      const uint64_t part = begin / kPartRows * width;
      LayerNormGradRows(end - begin, width, x + at, gamma, mean + begin,
                        rstd + begin, dy + at,
                        dx_add != nullptr ? dx_add + at : nullptr, dx + at,
                        gammas + part, betas + part);
    });
    SumParts(rows, width, gammas, dgamma);
    SumParts(rows, width, betas, dbeta);
  }

  void Gelu(uint64_t count, const float* x, float* y) override {
    ForElems(count, [&](uint64_t begin, uint64_t elems) {
      GeluPiece(elems, x + begin, y + begin);
    });
  }

  void GeluGrad(uint64_t count, const float* x, const float* dy,
                float* dx) override {
    ForElems(count, [&](uint64_t begin, uint64_t elems) {
      GeluGradPiece(elems, x + begin, dy + begin, dx + begin);
    });
  }

  uint64_t AttentionScratchBytes(const AttentionShape& shape) override {
    return Threads() * AttentionTaskScratchBytes(shape);
  }

  void Attention(const AttentionShape& shape, const float* q, const float* k,
                 const float* v, float* out, float* lse,
                 void* scratch) override {
    ForHeads(shape, AttentionTaskScratchBytes(shape), scratch,
             [&](uint64_t sequence, uint64_t kv_head, float* own) {
               AttentionTask(shape, sequence, kv_head, q, k, v, out, lse, own);
             });
  }

  uint64_t AttentionGradScratchBytes(const AttentionShape& shape) override {
    return Threads() * AttentionGradTaskScratchBytes(shape);
  }

  void AttentionGrad(const AttentionShape& shape, const float* q,
                     const float* k, const float* v, const float* out,
                     const float* lse, const float* dout, float* dq, float* dk,
                     float* dv, void* scratch) override {
    ForHeads(shape, AttentionGradTaskScratchBytes(shape), scratch,
             [&](uint64_t sequence, uint64_t kv_head, float* own) {
               AttentionGradTask(shape, sequence, kv_head, q, k, v, out, lse,
                                 dout, dq, dk, dv, own);
             });
  }

  void Embedding(uint64_t batch, uint64_t tokens, uint64_t width, DType dtype,
                 const uint32_t* ids, const void* token_table,
                 const void* position_table, float* y) override {
    const auto copy_rows = [&](const auto* token, const auto* position) {
      pool_.RunPieces(
          batch * tokens, kPartRows, [&](uint64_t begin, uint64_t end) {
            for (uint64_t r = begin; r < end; ++r) {
              const uint64_t position_at = r % tokens * width;
              EmbedRow(width, token + ids[r] * width,
                       position != nullptr ? position + position_at : nullptr,
                       y + r * width);
            }
          });
    };
    if (dtype == DType::kF32) {
      copy_rows(static_cast<const float*>(token_table),
                static_cast<const float*>(position_table));
    } else {
      copy_rows(static_cast<const uint16_t*>(token_table),
                static_cast<const uint16_t*>(position_table));
    }
  }

  // Each task owns a range of the table, so an id's rows are added in order.
  void EmbeddingGrad(uint64_t batch, uint64_t tokens, uint64_t width,
                     uint64_t vocab, uint64_t position_rows,
                     const uint32_t* ids, const float* dy, float* dtoken,
                     float* dposition) override {
    const uint64_t part = (vocab + kScatterParts - 1) / kScatterParts;
    pool_.RunPieces(vocab, part, [&](uint64_t begin, uint64_t end) {
      std::fill(dtoken + begin * width, dtoken + end * width, 0.0f);
      for (uint64_t r = 0; r < batch * tokens; ++r) {
        if (ids[r] < begin || ids[r] >= end) continue;
        float* const row = dtoken + ids[r] * width;
        AddPiece(width, row, dy + r * width, row);
      }
    });
    if (dposition == nullptr) return;
    pool_.RunPieces(position_rows, 1, [&](uint64_t p, uint64_t) {
      float* const row = dposition + p * width;
      std::fill_n(row, width, 0.0f);
      if (p >= tokens) return;
      ColumnSums(batch, tokens * width, width, dy + p * width, row);
    });
  }

  uint64_t CrossEntropyScratchBytes(uint64_t rows) override {
    return rows * sizeof(double);
  }

  double CrossEntropy(uint64_t rows, uint64_t vocab, const uint32_t* targets,
                      bool with_grad, float* logits, void* scratch) override {
    auto* const losses = static_cast<double*>(scratch);
    pool_.Run(rows, [&](uint64_t r, int) {
      BALLAST_CHECK(targets[r] < vocab);
      losses[r] =
          CrossEntropyRow(vocab, targets[r], with_grad, logits + r * vocab);
    });
    return std::accumulate(losses, losses + rows, 0.0);
  }

  void Add(uint64_t count, const float* a, const float* b, float* y) override {
    ForElems(count, [&](uint64_t begin, uint64_t elems) {
      AddPiece(elems, a + begin, b + begin, y + begin);
    });
  }

  void Accumulate(uint64_t count, const float* term, float* total) override {
    ForElems(count, [&](uint64_t begin, uint64_t elems) {
      AccumulateCpu(absl::MakeConstSpan(term + begin, elems),
                    absl::MakeSpan(total + begin, elems));
    });
  }

 private:
  static uint64_t Parts(uint64_t rows) {
    return (rows + kPartRows - 1) / kPartRows;
  }

  static float Widen(float value) { return value; }
  static float Widen(uint16_t bits) { return FromBF16(bits); }

  template <typename T>
  static void EmbedRow(uint64_t width, const T* token, const T* position,
                       float* y) {
    for (uint64_t i = 0; i < width; ++i) {
      y[i] = position != nullptr ? Widen(token[i]) + Widen(position[i])
                                 : Widen(token[i]);
    }
  }

  uint64_t Threads() const { return static_cast<uint64_t>(pool_.threads()); }

  template <typename Piece>
  void ForElems(uint64_t count, const Piece& piece) {
    pool_.RunPieces(count, kPieceElems, [&](uint64_t begin, uint64_t end) {
      piece(begin, end - begin);
    });
  }

  // Calls task(sequence, kv_head, scratch of the thread).
  template <typename Task>
  void ForHeads(const AttentionShape& shape, uint64_t task_bytes, void* scratch,
                const Task& task) {
    pool_.Run(shape.batch * shape.kv_heads, [&](uint64_t i, int thread) {
      auto* const own = static_cast<std::byte*>(scratch) +
                        static_cast<uint64_t>(thread) * task_bytes;
      task(i / shape.kv_heads, i % shape.kv_heads,
           reinterpret_cast<float*>(own));
    });
  }

  // sums (columns) = the sum of the sums of each part of `rows` rows.
  void SumParts(uint64_t rows, uint64_t columns, const float* parts,
                float* sums) {
    pool_.RunPieces(columns, kSumColumns, [&](uint64_t begin, uint64_t end) {
      ColumnSums(Parts(rows), columns, end - begin, parts + begin,
                 sums + begin);
    });
  }

  TaskPool pool_;
  MatrixProducts products_;
};

}  // namespace

absl::Status CheckCpuForKernels() {
  // The targets that kernels/CMakeLists.txt builds.
  if ((hwy::SupportedTargets() & HWY_TARGETS) != 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this processor has no fused multiply-add; want AVX2 with FMA, or newer");
}

bool CpuHasBF16Products() { return MatrixProducts::HasBF16(); }

std::unique_ptr<Kernels> MakeCpuKernels(int threads) {
  return std::make_unique<CpuKernels>(threads);
}

}  // namespace ballast
