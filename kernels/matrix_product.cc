// SPDX-License-Identifier: Apache-2.0
#include "kernels/matrix_product.h"

#include <omp.h>

#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace ballast {
namespace {

using dnnl::memory;

// Rows of a tile. Measured on two Zen 4 cores with packed weights: 64 reaches
// 98 % of the rate of 512, and leaves work for more threads.
constexpr uint64_t kTileRows = 64;
// Columns that one task packs; a multiple of the 64 that oneDNN lays out
// together.
constexpr uint64_t kPanelColumns = 128;
constexpr uint64_t kAlign = 64;

uint64_t Padded(uint64_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

dnnl::primitive_attr ScratchFromCaller() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

// While it lives, oneDNN plans for and uses the calling thread alone.
class OneDnnOnThisThread {
 public:
  OneDnnOnThisThread() : before_(omp_get_max_threads()) {
    omp_set_num_threads(1);
  }
  ~OneDnnOnThisThread() { omp_set_num_threads(before_); }
  OneDnnOnThisThread(const OneDnnOnThisThread&) = delete;
  OneDnnOnThisThread& operator=(const OneDnnOnThisThread&) = delete;

 private:
  const int before_;
};

memory::data_type TypeOf(DType dtype) {
  return dtype == DType::kF32 ? memory::data_type::f32
                              : memory::data_type::bf16;
}

memory::dim Dim(uint64_t value) { return static_cast<memory::dim>(value); }

// A matrix as it lies in memory: element (i, j) at i * row + j * column.
struct Layout {
  uint64_t row = 0;
  uint64_t column = 0;
  DType dtype = DType::kF32;

  memory::desc Desc(uint64_t rows, uint64_t columns) const {
    return memory::desc({Dim(rows), Dim(columns)}, TypeOf(dtype),
                        memory::dims{Dim(row), Dim(column)});
  }
};

// c (m, n) = a (m, k) * b (k, n), computed in `dtype` with fp32 sums.
struct Shape {
  uint64_t m = 0;
  uint64_t k = 0;
  uint64_t n = 0;
  Layout a;
  Layout b;
  DType dtype = DType::kF32;
};

// Which operand is a, which is b and which is c follows from how W is stored:
// c must come out row-major.
Shape ShapeOf(LinearProduct product, const LinearShape& linear) {
  const auto [rows, in, out, out_major, dtype] = linear;
  const Layout weight =
      out_major ? Layout{1, in, dtype} : Layout{out, 1, dtype};
  switch (product) {
    case LinearProduct::kForward:
      return {rows, in, out, {in, 1, DType::kF32}, weight, dtype};
    case LinearProduct::kGradInput:
      return {rows,
              out,
              in,
              {out, 1, DType::kF32},
              {weight.column, weight.row, dtype},
              dtype};
    case LinearProduct::kGradWeight:
      break;
  }
  if (out_major) {  // dW (out, in) = dy^T x.
    return {out, rows, in, {1, out, DType::kF32}, {in, 1, DType::kF32}, dtype};
  }
  return {in, rows, out, {1, in, DType::kF32}, {out, 1, DType::kF32}, dtype};
}

// oneDNN asks for mutable pointers, also to what it only reads.
memory Bind(const memory::desc& desc, const dnnl::engine& engine,
            const void* data) {
  return memory(desc, engine, const_cast<void*>(data));
}

// Copies a matrix into another layout or type.
struct Conversion {
  Conversion(const dnnl::engine& engine, const memory::desc& source,
             const memory::desc& target)
      : from(source), to(target) {
    const dnnl::reorder::primitive_desc desc(engine, from, engine, to,
                                             ScratchFromCaller());
    scratch = desc.scratchpad_desc();
    reorder = dnnl::reorder(desc);
  }

  void Run(const dnnl::engine& engine, dnnl::stream& stream, const void* source,
           void* target, void* scratchpad) const {
    reorder.execute(stream,
                    {{DNNL_ARG_FROM, Bind(from, engine, source)},
                     {DNNL_ARG_TO, Bind(to, engine, target)},
                     {DNNL_ARG_SCRATCHPAD, Bind(scratch, engine, scratchpad)}});
  }

  memory::desc from;
  memory::desc to;
  memory::desc scratch;
  dnnl::reorder reorder;
};

// `rows` rows of c: a product on one thread. `packed_b` is the layout of b that
// an earlier tile chose; absent, this one chooses.
struct Tile {
  Tile(const dnnl::engine& engine, const Shape& shape, uint64_t tile_rows,
       bool with_bias, const std::optional<memory::desc>& packed_b)
      : rows(tile_rows) {
    const memory::data_type type = TypeOf(shape.dtype);
    const memory::desc a = Layout{shape.k, 1, shape.dtype}.Desc(rows, shape.k);
    const memory::desc b = packed_b.value_or(memory::desc(
        {Dim(shape.k), Dim(shape.n)}, type, memory::format_tag::any));
    const memory::desc c = Layout{shape.n, 1, DType::kF32}.Desc(rows, shape.n);
    const memory::desc bias({1, Dim(shape.n)}, memory::data_type::f32,
                            memory::format_tag::ab);
    desc = dnnl::matmul::primitive_desc(with_bias
                                            ? dnnl::matmul::desc(a, b, bias, c)
                                            : dnnl::matmul::desc(a, b, c),
                                        ScratchFromCaller(), engine);
    product = dnnl::matmul(desc);
    const memory::desc stored = shape.a.Desc(rows, shape.k);
    if (stored != a) convert_a.emplace(engine, stored, a);
  }

  uint64_t ConvertedBytes() const {
    return convert_a ? Padded(convert_a->to.get_size()) : 0;
  }
  uint64_t ScratchBytes() const {
    const uint64_t product_bytes = desc.scratchpad_desc().get_size();
    const uint64_t convert_bytes =
        convert_a ? convert_a->scratch.get_size() : 0;
    return ConvertedBytes() + Padded(std::max(product_bytes, convert_bytes));
  }

  uint64_t rows;
  dnnl::matmul::primitive_desc desc;
  dnnl::matmul product;
  std::optional<Conversion> convert_a;  // Where a is not stored as wanted.
};

}  // namespace

// A compiled product: b is packed by panels of columns, then the tiles of rows
// are computed, the last of them perhaps a shorter one.
class MatrixProducts::Plan {
 public:
  Plan(const dnnl::engine& engine, const Shape& shape, bool with_bias)
      : engine_(engine), shape_(shape) {
    const OneDnnOnThisThread guard;
    std::optional<memory::desc> packed;
    if (shape.m >= kTileRows) {
      whole_.emplace(engine, shape, kTileRows, with_bias, packed);
      packed = whole_->desc.weights_desc();
    }
    if (shape.m % kTileRows != 0) {
      rest_.emplace(engine, shape, shape.m % kTileRows, with_bias, packed);
      packed = rest_->desc.weights_desc();
    }
    if (shape.b.Desc(shape.k, shape.n) != *packed) PlanPacking(*packed);
  }

  uint64_t ScratchBytes(int threads) const {
    return packed_bytes_ + static_cast<uint64_t>(threads) * ThreadBytes();
  }

  void Run(TaskPool* pool, const void* a, const void* b, const float* bias,
           float* c, void* scratch) const {
    auto* const packed = static_cast<std::byte*>(scratch);
    const auto of_thread = [&](int thread) {
      return packed + packed_bytes_ +
             static_cast<uint64_t>(thread) * ThreadBytes();
    };
    pool->Run(packing_.size(), [&](uint64_t i, int thread) {
      const OneDnnOnThisThread guard;
      dnnl::stream stream(engine_);
      packing_[i].Run(engine_, stream, b, packed, of_thread(thread));
    });
    if (!packing_.empty()) b = packed;
    const uint64_t tiles = (shape_.m + kTileRows - 1) / kTileRows;
    pool->Run(tiles, [&](uint64_t i, int thread) {
      const OneDnnOnThisThread guard;
      const bool is_whole = (i + 1) * kTileRows <= shape_.m;
      RunTile(is_whole ? *whole_ : *rest_, i * kTileRows, a, b, bias, c,
              of_thread(thread));
    });
  }

 private:
  void PlanPacking(const memory::desc& packed) {
    packed_bytes_ = Padded(packed.get_size());
    const memory::desc stored = shape_.b.Desc(shape_.k, shape_.n);
    for (uint64_t first = 0; first < shape_.n; first += kPanelColumns) {
      const memory::dims size = {
          Dim(shape_.k), Dim(std::min(kPanelColumns, shape_.n - first))};
      const memory::dims at = {0, Dim(first)};
      packing_.emplace_back(engine_, stored.submemory_desc(size, at),
                            packed.submemory_desc(size, at));
    }
  }

  // Packing and tiles follow one another and share it.
  uint64_t ThreadBytes() const {
    uint64_t bytes = 0;
    for (const Conversion& panel : packing_) {
      bytes = std::max<uint64_t>(bytes, panel.scratch.get_size());
    }
    if (whole_) bytes = std::max(bytes, whole_->ScratchBytes());
    if (rest_) bytes = std::max(bytes, rest_->ScratchBytes());
    return Padded(bytes);
  }

  void RunTile(const Tile& tile, uint64_t first_row, const void* a,
               const void* b, const float* bias, float* c,
               std::byte* scratch) const {
    dnnl::stream stream(engine_);
    const void* rows_of_a =
        static_cast<const std::byte*>(a) +
        first_row * shape_.a.row * DTypeBytes(shape_.a.dtype);
    std::byte* const scratchpad = scratch + tile.ConvertedBytes();
    if (tile.convert_a) {
      tile.convert_a->Run(engine_, stream, rows_of_a, scratch, scratchpad);
      rows_of_a = scratch;
    }
    std::unordered_map<int, memory> arguments = {
        {DNNL_ARG_SRC, Bind(tile.desc.src_desc(), engine_, rows_of_a)},
        {DNNL_ARG_WEIGHTS, Bind(tile.desc.weights_desc(), engine_, b)},
        {DNNL_ARG_DST,
         Bind(tile.desc.dst_desc(), engine_, c + first_row * shape_.n)},
        {DNNL_ARG_SCRATCHPAD,
         Bind(tile.desc.scratchpad_desc(), engine_, scratchpad)}};
    if (bias != nullptr) {
      arguments.emplace(DNNL_ARG_BIAS,
                        Bind(tile.desc.bias_desc(), engine_, bias));
    }
    tile.product.execute(stream, arguments);
  }

  const dnnl::engine engine_;
  const Shape shape_;
  std::optional<Tile> whole_;
  std::optional<Tile> rest_;
  std::vector<Conversion> packing_;  // Empty where b is stored as wanted.
  uint64_t packed_bytes_ = 0;
};

struct MatrixProducts::Cache {
  using Key = std::tuple<LinearProduct, uint64_t, uint64_t, uint64_t, bool,
                         DType, bool>;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  std::map<Key, std::unique_ptr<Plan>> plans;
};

MatrixProducts::MatrixProducts(TaskPool* pool)
    : pool_(pool), cache_(std::make_unique<Cache>()) {}

MatrixProducts::~MatrixProducts() = default;

bool MatrixProducts::HasBF16() {
  // A set of instructions is a set of bits; all that multiply bf16 hold this
  // one. Without it oneDNN widens to fp32, in megabytes that it allocates
  // itself, beside every budget, and rounds differently.
  constexpr auto kNeeded =
      static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  const auto present = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  return (present & kNeeded) == kNeeded;
}

std::string MatrixProducts::Identity() {
  const dnnl::version_t& library = *dnnl::version();
  return absl::StrCat(
      "oneDNN ", library.major, ".", library.minor, ".", library.patch,
      " with instruction set ",
      absl::Hex(static_cast<unsigned>(dnnl::get_effective_cpu_isa())));
}

const MatrixProducts::Plan& MatrixProducts::PlanFor(LinearProduct product,
                                                    const LinearShape& shape,
                                                    bool with_bias) {
  BALLAST_CHECK(shape.rows > 0 && shape.in > 0 && shape.out > 0);
  std::unique_ptr<Plan>& plan =
      cache_->plans[{product, shape.rows, shape.in, shape.out, shape.out_major,
                     shape.dtype, with_bias}];
  if (plan == nullptr) {
    plan = std::make_unique<Plan>(cache_->engine, ShapeOf(product, shape),
                                  with_bias);
  }
  return *plan;
}

uint64_t MatrixProducts::ScratchBytes(LinearProduct product,
                                      const LinearShape& shape) {
  const int threads = pool_->threads();
  const uint64_t bytes = PlanFor(product, shape, false).ScratchBytes(threads);
  if (product != LinearProduct::kForward) return bytes;
  return std::max(bytes, PlanFor(product, shape, true).ScratchBytes(threads));
}

void MatrixProducts::Run(LinearProduct product, const LinearShape& shape,
                         const void* a, const void* b, const float* bias,
                         float* c, void* scratch) {
  // dW (out, in) = dy^T x: the operands change places.
  if (product == LinearProduct::kGradWeight && shape.out_major) std::swap(a, b);
  PlanFor(product, shape, bias != nullptr).Run(pool_, a, b, bias, c, scratch);
}

}  // namespace ballast
