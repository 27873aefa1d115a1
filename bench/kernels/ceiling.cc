// SPDX-License-Identifier: Apache-2.0
#include <omp.h>

#include <algorithm>

#include "bench/kernels/bench_util.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace ballast::bench {
namespace {

double Measure(DType dtype, int threads) {
  using dnnl::memory;
  constexpr int64_t kSide = 1536;
  const auto type =
      dtype == DType::kF32 ? memory::data_type::f32 : memory::data_type::bf16;
  omp_set_num_threads(threads);
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const memory::dims dims = {kSide, kSide};
  const memory::desc any(dims, type, memory::format_tag::any);
  const memory::desc out(dims, memory::data_type::f32, memory::format_tag::ab);
  const dnnl::matmul::primitive_desc desc(dnnl::matmul::desc(any, any, out),
                                          engine);
  const dnnl::matmul product(desc);
  memory a(desc.src_desc(), engine);
  memory b(desc.weights_desc(), engine);
  memory c(desc.dst_desc(), engine);
  for (memory* zeroed : {&a, &b}) {
    auto* const bytes = static_cast<std::byte*>(zeroed->get_data_handle());
    std::fill_n(bytes, zeroed->get_desc().get_size(), std::byte{0});
  }
  double best = 1e9;
  for (int i = 0; i < 20; ++i) {
    const double start = Seconds();
    product.execute(
        stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
    best = std::min(best, Seconds() - start);
  }
  return 2.0 * kSide * kSide * kSide / best * 1e-9;
}

}  // namespace

double CeilingGflops(DType dtype, int threads) {
  static const double fp32 = Measure(DType::kF32, threads);
  if (dtype == DType::kF32) return fp32;
  static const double bf16 = Measure(DType::kBF16, threads);
  return bf16;
}

}  // namespace ballast::bench
