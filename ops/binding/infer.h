// SPDX-License-Identifier: Apache-2.0
// Shapes and dtypes of the outputs, for graphs that are built before any data exists. Unknown sizes
// are -1 there and pass through; the values are checked when the op runs (arguments.cc).
#pragma once

#include <cstdint>
#include <vector>

#include "errors.h"
#include "paddle/extension.h"

namespace fm3::binding {

using Dims = std::vector<int64_t>;

inline std::vector<Dims> infer_forward_shape(const Dims& q, const Dims&, const Dims& v, const Dims&,
                                             const Dims&) {
  if (q.size() != 4 || v.size() != 4) {
    fail("q and v have ", q.size(), " and ", v.size(), " axes; expected 4, [b, s, h, d]");
  }
  return {{q[0], q[1], q[2], v[3]}, {q[0], q[2], q[1]}};
}

inline std::vector<paddle::DataType> infer_forward_dtype(paddle::DataType q, paddle::DataType,
                                                         paddle::DataType, paddle::DataType,
                                                         paddle::DataType) {
  return {q, paddle::DataType::FLOAT32};
}

inline std::vector<Dims> infer_backward_shape(const Dims& q, const Dims& k, const Dims& v,
                                              const Dims&, const Dims&, const Dims&, const Dims&,
                                              const Dims&, const Dims&) {
  return {q, k, v};
}

inline std::vector<paddle::DataType> infer_backward_dtype(paddle::DataType q, paddle::DataType k,
                                                          paddle::DataType v, paddle::DataType,
                                                          paddle::DataType, paddle::DataType,
                                                          paddle::DataType, paddle::DataType,
                                                          paddle::DataType) {
  return {q, k, v};
}

}  // namespace fm3::binding
