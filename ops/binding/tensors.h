// SPDX-License-Identifier: Apache-2.0
// From framework tensors to the raw pointers and strides of the C ABI.
#pragma once

#include "fm3/params.h"
#include "paddle/extension.h"

namespace fm3::binding {

// A tensor the kernels can read: its last axis is contiguous. Holds the copy, if one was needed.
class ReadableTensor {
 public:
  explicit ReadableTensor(const paddle::Tensor& tensor);  // [b, s, h, d]
  const void* data() const { return tensor_.data(); }
  Strides strides() const { return strides_; }

 private:
  paddle::Tensor tensor_;
  Strides strides_;
};

Strides contiguous_strides(int64_t s, int64_t h, int64_t d);

paddle::Tensor contiguous(const paddle::Tensor& tensor);

// A zero-filled tensor beside `like`, without a framework kernel and in the order of its stream.
paddle::Tensor zeros(const std::vector<int64_t>& dims, paddle::DataType dtype,
                     const paddle::Tensor& like);

}  // namespace fm3::binding
