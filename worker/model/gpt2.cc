// SPDX-License-Identifier: Apache-2.0
#include "worker/model/gpt2.h"

#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/model/layer_ops.h"

namespace ballast {
namespace {

constexpr float kLayerNormEpsilon = 1e-5f;

// Everything that the units share.
struct Gpt2Shape {
  uint64_t batch = 0;
  uint64_t tokens = 0;
  uint64_t width = 0;
  uint64_t heads = 0;
  uint64_t vocabulary = 0;
  DType dtype = DType::kF32;

  uint64_t rows() const { return batch * tokens; }
  LinearShape Linear(uint64_t in, uint64_t out, bool out_major = false) const {
    return {rows(), in, out, out_major, dtype};
  }
};

class EmbeddingUnit : public Unit {
 public:
  // Slots: wte, wpe.
  explicit EmbeddingUnit(const Gpt2Shape& shape) : shape_(shape) {}

  bool backward_reads_weights() const override { return false; }

  absl::StatusOr<DeviceBuffer> Forward(const UnitArgs& args,
                                       KeptActivations* /*keep*/) override {
    LayerOps ops(args.device);
    BALLAST_ASSIGN_OR_RETURN(DeviceBuffer y,
                             ops.Activations(shape_.rows() * shape_.width));
    ops.kernels().Embedding(shape_.batch, shape_.tokens, shape_.width,
                            shape_.dtype, args.ids, args.weights[0],
                            args.weights[1], y.as<float>());
    return y;
  }

  absl::StatusOr<DeviceBuffer> Backward(const UnitArgs& args,
                                        KeptActivations /*kept*/,
                                        DeviceBuffer dy,
                                        GradientWriter* writer) override {
    BALLAST_ASSIGN_OR_RETURN(float* const dtoken, writer->Begin(0));
    BALLAST_ASSIGN_OR_RETURN(float* const dposition, writer->Begin(1));
    args.device->kernels().EmbeddingGrad(
        shape_.batch, shape_.tokens, shape_.width, shape_.vocabulary,
        shape_.tokens, args.ids, dy.as<float>(), dtoken, dposition);
    BALLAST_RETURN_IF_ERROR(writer->Done(0));
    BALLAST_RETURN_IF_ERROR(writer->Done(1));
    return DeviceBuffer();
  }

 private:
  const Gpt2Shape shape_;
};

// Layer normalisation in front of each half of a block and of the head.
struct Normed {
  DeviceBuffer y;      // (rows, width).
  DeviceBuffer stats;  // mean, then rstd: (rows) each.
  const float* mean() const { return stats.as<float>(); }
  const float* rstd(uint64_t rows) const {
    return At(stats.as<const float>(), rows);
  }
};

absl::StatusOr<Normed> Normalise(const Gpt2Shape& shape, LayerOps* ops,
                                 const float* x, const void* gamma,
                                 const void* beta) {
  Normed out;
  BALLAST_ASSIGN_OR_RETURN(out.y, ops->Activations(shape.rows() * shape.width));
  BALLAST_ASSIGN_OR_RETURN(out.stats, ops->Activations(2 * shape.rows()));
  ops->kernels().LayerNorm(shape.rows(), shape.width, kLayerNormEpsilon, x,
                           static_cast<const float*>(gamma),
                           static_cast<const float*>(beta), out.y.as<float>(),
                           out.stats.as<float>(),
                           At(out.stats.as<float>(), shape.rows()));
  return out;
}

// y = x + project(attention(qkv(norm(x)))).
class AttentionUnit : public Unit {
 public:
  enum Slot : uint32_t { kGamma, kBeta, kQkv, kQkvBias, kProj, kProjBias };

  explicit AttentionUnit(const Gpt2Shape& shape)
      : shape_(shape),
        attention_{.batch = shape.batch,
                   .tokens = shape.tokens,
                   .heads = shape.heads,
                   .kv_heads = shape.heads,
                   .head_size = shape.width / shape.heads,
                   .q_stride = 3 * shape.width,
                   .kv_stride = 3 * shape.width,
                   .out_stride = shape.width} {}

  absl::StatusOr<DeviceBuffer> Forward(const UnitArgs& args,
                                       KeptActivations* keep) override {
    LayerOps ops(args.device);
    BALLAST_ASSIGN_OR_RETURN(Inner inner, ComputeInner(&ops, args));
    const uint64_t elems = shape_.rows() * shape_.width;
    BALLAST_ASSIGN_OR_RETURN(DeviceBuffer y, ops.Activations(elems));
    BALLAST_RETURN_IF_ERROR(ops.Linear(
        shape_.Linear(shape_.width, shape_.width), inner.out.as<float>(),
        args.weights[kProj], args.weights[kProjBias], y.as<float>()));
    ops.kernels().Add(elems, args.x, y.as<float>(), y.as<float>());
    if (keep != nullptr) {
      keep->push_back(std::move(inner.norm.y));
      keep->push_back(std::move(inner.norm.stats));
      keep->push_back(std::move(inner.qkv));
      keep->push_back(std::move(inner.out));
      keep->push_back(std::move(inner.lse));
    }
    return y;
  }

  absl::StatusOr<DeviceBuffer> Backward(const UnitArgs& args,
                                        KeptActivations kept, DeviceBuffer dy,
                                        GradientWriter* writer) override {
    LayerOps ops(args.device);
    Inner inner;
    if (kept.empty()) {
      BALLAST_ASSIGN_OR_RETURN(inner, ComputeInner(&ops, args));
    } else {
      inner = {{std::move(kept[0]), std::move(kept[1])},
               std::move(kept[2]),
               std::move(kept[3]),
               std::move(kept[4])};
    }
    BALLAST_ASSIGN_OR_RETURN(DeviceBuffer dqkv,
                             GradQkv(&ops, args, &inner, dy, writer));
    const LinearShape qkv_shape = shape_.Linear(shape_.width, 3 * shape_.width);
    BALLAST_RETURN_IF_ERROR(
        ops.LinearGradWeight(qkv_shape, inner.norm.y.as<float>(),
                             dqkv.as<float>(), writer, kQkv, kQkvBias));
    // The normalised input is not read again: its gradient takes its place.
    const DeviceBuffer dnorm = std::move(inner.norm.y);
    BALLAST_RETURN_IF_ERROR(ops.LinearGradInput(
        qkv_shape, dqkv.as<float>(), args.weights[kQkv], dnorm.as<float>()));
    dqkv.reset();
    BALLAST_RETURN_IF_ERROR(ops.LayerNormGrad(
        shape_.rows(), shape_.width, args.x, args.weights[kGamma],
        inner.norm.mean(), inner.norm.rstd(shape_.rows()), dnorm.as<float>(),
        dy.as<float>(), dy.as<float>(), writer, kGamma));
    return dy;
  }

 private:
  struct Inner {
    Normed norm;
    DeviceBuffer qkv;  // (rows, 3 * width).
    DeviceBuffer out;  // (rows, width), of the attention.
    DeviceBuffer lse;  // (batch, heads, tokens).
  };

  absl::StatusOr<Inner> ComputeInner(LayerOps* ops, const UnitArgs& args) {
    Inner inner;
    BALLAST_ASSIGN_OR_RETURN(
        inner.norm, Normalise(shape_, ops, args.x, args.weights[kGamma],
                              args.weights[kBeta]));
    const uint64_t elems = shape_.rows() * shape_.width;
    BALLAST_ASSIGN_OR_RETURN(inner.qkv, ops->Activations(3 * elems));
    BALLAST_RETURN_IF_ERROR(ops->Linear(
        shape_.Linear(shape_.width, 3 * shape_.width), inner.norm.y.as<float>(),
        args.weights[kQkv], args.weights[kQkvBias], inner.qkv.as<float>()));
    BALLAST_ASSIGN_OR_RETURN(inner.out, ops->Activations(elems));
    BALLAST_ASSIGN_OR_RETURN(inner.lse,
                             ops->Activations(shape_.rows() * shape_.heads));
    const float* const qkv = inner.qkv.as<float>();
    BALLAST_RETURN_IF_ERROR(ops->Attention(
        attention_, qkv, At(qkv, shape_.width), At(qkv, 2 * shape_.width),
        inner.out.as<float>(), inner.lse.as<float>()));
    return inner;
  }

  // Backward from dy through the projection and the attention; gives back qkv,
  // out and lse on the way.
  absl::StatusOr<DeviceBuffer> GradQkv(LayerOps* ops, const UnitArgs& args,
                                       Inner* inner, const DeviceBuffer& dy,
                                       GradientWriter* writer) {
    const uint64_t elems = shape_.rows() * shape_.width;
    const LinearShape proj_shape = shape_.Linear(shape_.width, shape_.width);
    BALLAST_RETURN_IF_ERROR(
        ops->LinearGradWeight(proj_shape, inner->out.as<float>(),
                              dy.as<float>(), writer, kProj, kProjBias));
    BALLAST_ASSIGN_OR_RETURN(const DeviceBuffer dout, ops->Activations(elems));
    BALLAST_RETURN_IF_ERROR(ops->LinearGradInput(
        proj_shape, dy.as<float>(), args.weights[kProj], dout.as<float>()));
    BALLAST_ASSIGN_OR_RETURN(DeviceBuffer dqkv, ops->Activations(3 * elems));
    const float* const qkv = inner->qkv.as<float>();
    float* const grad = dqkv.as<float>();
    BALLAST_RETURN_IF_ERROR(ops->AttentionGrad(
        attention_, qkv, At(qkv, shape_.width), At(qkv, 2 * shape_.width),
        inner->out.as<float>(), inner->lse.as<float>(), dout.as<float>(), grad,
        At(grad, shape_.width), At(grad, 2 * shape_.width)));
    inner->qkv.reset();
    inner->out.reset();
    inner->lse.reset();
    return dqkv;
  }

  const Gpt2Shape shape_;
  const AttentionShape attention_;
};

// y = x + project(gelu(expand(norm(x)))).
class MlpUnit : public Unit {
 public:
  enum Slot : uint32_t { kGamma, kBeta, kFc, kFcBias, kProj, kProjBias };

  explicit MlpUnit(const Gpt2Shape& shape)
      : shape_(shape), inner_width_(4 * shape.width) {}

  absl::StatusOr<DeviceBuffer> Forward(const UnitArgs& args,
                                       KeptActivations* keep) override {
    LayerOps ops(args.device);
    BALLAST_ASSIGN_OR_RETURN(Inner inner, ComputeInner(&ops, args));
    const uint64_t elems = shape_.rows() * shape_.width;
    BALLAST_ASSIGN_OR_RETURN(DeviceBuffer y, ops.Activations(elems));
    BALLAST_RETURN_IF_ERROR(ops.Linear(
        shape_.Linear(inner_width_, shape_.width), inner.active.as<float>(),
        args.weights[kProj], args.weights[kProjBias], y.as<float>()));
    ops.kernels().Add(elems, args.x, y.as<float>(), y.as<float>());
    if (keep != nullptr) {
      keep->push_back(std::move(inner.norm.y));
      keep->push_back(std::move(inner.norm.stats));
      keep->push_back(std::move(inner.expanded));
      keep->push_back(std::move(inner.active));
    }
    return y;
  }

  absl::StatusOr<DeviceBuffer> Backward(const UnitArgs& args,
                                        KeptActivations kept, DeviceBuffer dy,
                                        GradientWriter* writer) override {
    LayerOps ops(args.device);
    Inner inner;
    if (kept.empty()) {
      BALLAST_ASSIGN_OR_RETURN(inner, ComputeInner(&ops, args));
    } else {
      inner = {{std::move(kept[0]), std::move(kept[1])},
               std::move(kept[2]),
               std::move(kept[3])};
    }
    const uint64_t rows = shape_.rows();
    const LinearShape proj_shape = shape_.Linear(inner_width_, shape_.width);
    BALLAST_RETURN_IF_ERROR(
        ops.LinearGradWeight(proj_shape, inner.active.as<float>(),
                             dy.as<float>(), writer, kProj, kProjBias));
    // The activation is not read again: its gradient takes its place.
    DeviceBuffer dactive = std::move(inner.active);
    BALLAST_RETURN_IF_ERROR(ops.LinearGradInput(
        proj_shape, dy.as<float>(), args.weights[kProj], dactive.as<float>()));
    ops.kernels().GeluGrad(rows * inner_width_, inner.expanded.as<float>(),
                           dactive.as<float>(), dactive.as<float>());
    inner.expanded.reset();
    const LinearShape fc_shape = shape_.Linear(shape_.width, inner_width_);
    BALLAST_RETURN_IF_ERROR(
        ops.LinearGradWeight(fc_shape, inner.norm.y.as<float>(),
                             dactive.as<float>(), writer, kFc, kFcBias));
    const DeviceBuffer dnorm = std::move(inner.norm.y);
    BALLAST_RETURN_IF_ERROR(ops.LinearGradInput(
        fc_shape, dactive.as<float>(), args.weights[kFc], dnorm.as<float>()));
    dactive.reset();
    BALLAST_RETURN_IF_ERROR(ops.LayerNormGrad(
        rows, shape_.width, args.x, args.weights[kGamma], inner.norm.mean(),
        inner.norm.rstd(rows), dnorm.as<float>(), dy.as<float>(),
        dy.as<float>(), writer, kGamma));
    return dy;
  }

 private:
  struct Inner {
    Normed norm;
    DeviceBuffer expanded;  // (rows, 4 * width), before the GELU.
    DeviceBuffer active;    // The same after it.
  };

  absl::StatusOr<Inner> ComputeInner(LayerOps* ops, const UnitArgs& args) {
    Inner inner;
    BALLAST_ASSIGN_OR_RETURN(
        inner.norm, Normalise(shape_, ops, args.x, args.weights[kGamma],
                              args.weights[kBeta]));
    const uint64_t elems = shape_.rows() * inner_width_;
    BALLAST_ASSIGN_OR_RETURN(inner.expanded, ops->Activations(elems));
    BALLAST_RETURN_IF_ERROR(ops->Linear(
        shape_.Linear(shape_.width, inner_width_), inner.norm.y.as<float>(),
        args.weights[kFc], args.weights[kFcBias], inner.expanded.as<float>()));
    BALLAST_ASSIGN_OR_RETURN(inner.active, ops->Activations(elems));
    ops->kernels().Gelu(elems, inner.expanded.as<float>(),
                        inner.active.as<float>());
    return inner;
  }

  const Gpt2Shape shape_;
  const uint64_t inner_width_;
};

// logits = norm(x) * head^T.
class HeadUnit : public LossUnit {
 public:
  enum Slot : uint32_t { kHead, kGamma, kBeta };

  explicit HeadUnit(const Gpt2Shape& shape) : shape_(shape) {}

  absl::StatusOr<DeviceBuffer> Run(const UnitArgs& args, double* loss,
                                   GradientWriter* writer) override {
    LayerOps ops(args.device);
    const uint64_t rows = shape_.rows();
    const LinearShape shape =
        shape_.Linear(shape_.width, shape_.vocabulary, /*out_major=*/true);
    BALLAST_ASSIGN_OR_RETURN(
        Normed norm, Normalise(shape_, &ops, args.x, args.weights[kGamma],
                               args.weights[kBeta]));
    BALLAST_ASSIGN_OR_RETURN(DeviceBuffer logits,
                             ops.Activations(rows * shape_.vocabulary));
    BALLAST_RETURN_IF_ERROR(ops.Linear(shape, norm.y.as<float>(),
                                       args.weights[kHead], nullptr,
                                       logits.as<float>()));
    BALLAST_RETURN_IF_ERROR(ops.CrossEntropy(rows, shape_.vocabulary, args.ids,
                                             writer != nullptr,
                                             logits.as<float>(), loss));
    if (writer == nullptr) {
      return DeviceBuffer();
    }
    BALLAST_RETURN_IF_ERROR(ops.LinearGradWeight(shape, norm.y.as<float>(),
                                                 logits.as<float>(), writer,
                                                 kHead, /*bias_slot=*/-1));
    const DeviceBuffer dnorm = std::move(norm.y);
    BALLAST_RETURN_IF_ERROR(ops.LinearGradInput(
        shape, logits.as<float>(), args.weights[kHead], dnorm.as<float>()));
    logits.reset();
    BALLAST_ASSIGN_OR_RETURN(DeviceBuffer dx,
                             ops.Activations(rows * shape_.width));
    BALLAST_RETURN_IF_ERROR(
        ops.LayerNormGrad(rows, shape_.width, args.x, args.weights[kGamma],
                          norm.mean(), norm.rstd(rows), dnorm.as<float>(),
                          nullptr, dx.as<float>(), writer, kGamma));
    return dx;
  }

 private:
  const Gpt2Shape shape_;
};

// Declares tensors in forward order while units list them.
class LayoutBuilder {
 public:
  explicit LayoutBuilder(const Job& job) : job_(job) {}

  void Unit(std::string name) {
    layout_.units.push_back({std::move(name), {}});
  }

  TensorSpec* Matrix(std::string name, uint64_t rows, uint64_t columns,
                     double std) {
    TensorSpec* const tensor = Add(std::move(name), {rows, columns});
    tensor->init = Init::kNormal;
    tensor->init_std = std;
    tensor->decay = true;
    tensor->served = job_.precision.compute_dtype;
    return tensor;
  }

  void Vector(std::string name, uint64_t elems, Init init) {
    Add(std::move(name), {elems})->init = init;
  }

  // A further use of a tensor that is there.
  void Use(uint32_t tensor) {
    TensorSpec& spec = layout_.tensors[tensor];
    layout_.units.back().tensors.push_back({tensor, spec.use_count});
    ++spec.use_count;
  }

  ModelLayout Take() { return std::move(layout_); }

 private:
  TensorSpec* Add(std::string name, std::vector<uint64_t> shape) {
    const auto index = static_cast<uint32_t>(layout_.tensors.size());
    layout_.tensors.push_back(
        {.name = std::move(name), .shape = std::move(shape)});
    layout_.units.back().tensors.push_back({index, 0});
    return &layout_.tensors.back();
  }

  const Job& job_;
  ModelLayout layout_;
};

ModelLayout BuildLayout(const Job& job) {
  const uint64_t width = job.model.width;
  constexpr double kStd = 0.02;
  // Projections into the residual stream, of which there are two a layer.
  const double residual_std = kStd / std::sqrt(2.0 * job.model.layers);
  LayoutBuilder builder(job);
  builder.Unit("embedding");
  builder.Matrix("wte.weight", job.model.vocabulary, width, kStd)->by_rows =
      true;
  builder.Matrix("wpe.weight", job.model.context, width, 0.01);
  for (uint32_t layer = 0; layer < job.model.layers; ++layer) {
    const std::string block = absl::StrCat("h.", layer);
    const auto norm = [&](const char* name) {
      builder.Vector(absl::StrCat(block, ".", name, ".weight"), width,
                     Init::kOnes);
      builder.Vector(absl::StrCat(block, ".", name, ".bias"), width,
                     Init::kZeros);
    };
    const auto linear = [&](const char* name, uint64_t in, uint64_t out,
                            double std) {
      builder.Matrix(absl::StrCat(block, ".", name, ".weight"), in, out, std);
      builder.Vector(absl::StrCat(block, ".", name, ".bias"), out,
                     Init::kZeros);
    };
    builder.Unit(absl::StrCat(block, ".attn"));
    norm("ln_1");
    linear("attn.c_attn", width, 3 * width, kStd);
    linear("attn.c_proj", width, width, residual_std);
    builder.Unit(absl::StrCat(block, ".mlp"));
    norm("ln_2");
    linear("mlp.c_fc", width, 4 * width, kStd);
    linear("mlp.c_proj", 4 * width, width, residual_std);
  }
  builder.Unit("head");
  if (job.model.tied) {
    builder.Use(0);
  } else {
    builder.Matrix("lm_head.weight", job.model.vocabulary, width, kStd)
        ->by_rows = true;
  }
  builder.Vector("ln_f.weight", width, Init::kOnes);
  builder.Vector("ln_f.bias", width, Init::kZeros);
  return builder.Take();
}

class Gpt2 : public ModelFamily {
 public:
  explicit Gpt2(const Job& job)
      : layout_(BuildLayout(job)),
        shape_{.batch = job.batch.micro_batch_size,
               .tokens = job.model.context,
               .width = job.model.width,
               .heads = job.model.heads,
               .vocabulary = job.model.vocabulary,
               .dtype = job.precision.compute_dtype},
        embedding_(shape_),
        attention_(shape_),
        mlp_(shape_),
        head_(shape_) {}

  const ModelLayout& layout() const override { return layout_; }
  uint64_t rows() const override { return shape_.rows(); }
  uint64_t width() const override { return shape_.width; }
  // Units hold no state, so one object stands for all of its kind.
  Unit& unit(uint32_t index) override {
    if (index == 0) {
      return embedding_;
    }
    return index % 2 == 1 ? static_cast<Unit&>(attention_) : mlp_;
  }
  LossUnit& loss_unit() override { return head_; }

 private:
  const ModelLayout layout_;
  const Gpt2Shape shape_;
  EmbeddingUnit embedding_;
  AttentionUnit attention_;
  MlpUnit mlp_;
  HeadUnit head_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ModelFamily>> MakeGpt2(const Job& job) {
  auto family = std::make_unique<Gpt2>(job);
  BALLAST_RETURN_IF_ERROR(family->layout().Validate());
  return family;
}

}  // namespace ballast
