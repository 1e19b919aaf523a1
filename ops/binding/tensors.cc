// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include "backend.h"

namespace fm3::binding {

paddle::Tensor contiguous(const paddle::Tensor& tensor) {
#if FM3_PADDLE_MAJOR >= 3
  if (!tensor.is_contiguous()) return tensor.contiguous();
#endif
  return tensor;
}

Strides strides_of(const paddle::Tensor& tensor) {
  const std::vector<int64_t> dims = tensor.shape();
  return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3]};
}

paddle::Tensor zeros(const std::vector<int64_t>& dims, paddle::DataType dtype,
                     const paddle::Tensor& like) {
  paddle::Tensor tensor = paddle::empty(dims, dtype, like.place());
  const size_t num_bytes = tensor.numel() * phi::SizeOf(dtype);
  if (num_bytes != 0) backend_for(like).fill_zero(tensor.data(), num_bytes, stream_of(like));
  return tensor;
}

}  // namespace fm3::binding
