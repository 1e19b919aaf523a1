// SPDX-License-Identifier: Apache-2.0
// From framework tensors to the raw pointers and strides of the C ABI.
#pragma once

#include "fm3/params.h"
#include "paddle/extension.h"

namespace fm3::binding {

// The tensor itself, or a dense copy. NOTE: Paddle 3.3.1 already hands a custom op dense copies of
// strided tensors; this keeps the kernels right should a later one stop doing so. Paddle 2 cannot
// ask: there the caller passes dense tensors.
paddle::Tensor contiguous(const paddle::Tensor& tensor);

Strides strides_of(const paddle::Tensor& tensor);  // of a contiguous [b, s, h, d]

// A zero-filled tensor beside `like`, without a framework kernel and in the order of its stream.
paddle::Tensor zeros(const std::vector<int64_t>& dims, paddle::DataType dtype,
                     const paddle::Tensor& like);

}  // namespace fm3::binding
