// SPDX-License-Identifier: Apache-2.0
// One way to loop over an array by vectors, whatever their width: the body is
// written once and runs for whole vectors and for the rest. Include it per
// target, after highway.h.

#if defined(BALLAST_KERNELS_SWEEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_KERNELS_SWEEP_INL_H_
#undef BALLAST_KERNELS_SWEEP_INL_H_
#else
#define BALLAST_KERNELS_SWEEP_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using Float = hn::Vec<FloatTag>;

// All lanes of a vector.
struct Whole {
  template <class D, typename T>
  HWY_INLINE hn::Vec<D> Load(D d, const T* from) const {
    return hn::LoadU(d, from);
  }
  template <class V, class D, typename T>
  HWY_INLINE void Store(V v, D d, T* to) const {
    hn::StoreU(v, d, to);
  }
  // `v`; the lanes that exist, and `other` in the rest.
  template <class D, class V>
  HWY_INLINE V Or(D, V v, V) const {
    return v;
  }
};

// The first `count` lanes; the others read as zero and are not written.
struct First {
  size_t count;
  template <class D, typename T>
  HWY_INLINE hn::Vec<D> Load(D d, const T* from) const {
    return hn::MaskedLoad(hn::FirstN(d, count), d, from);
  }
  template <class V, class D, typename T>
  HWY_INLINE void Store(V v, D d, T* to) const {
    hn::BlendedStore(v, hn::FirstN(d, count), d, to);
  }
  template <class D, class V>
  HWY_INLINE V Or(D d, V v, V other) const {
    return hn::IfThenElse(hn::FirstN(d, count), v, other);
  }
};

// Calls body(index, part) along [0, count).
template <class Body>
HWY_INLINE void Sweep(size_t count, const Body& body) {
  const size_t lanes = hn::Lanes(FloatTag());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) body(i, Whole{});
  if (i < count) body(i, First{count - i});
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#endif  // BALLAST_KERNELS_SWEEP_INL_H_
