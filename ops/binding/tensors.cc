// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include "backend.h"

namespace fm3::binding {

paddle::Tensor contiguous(const paddle::Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
#if FM3_PADDLE_MAJOR >= 3
  return tensor.contiguous();
#else
  PD_THROW("fm3_attention: a strided tensor needs Paddle 3 or newer; pass tensor.contiguous()");
#endif
}

Strides strides_of(const paddle::Tensor& tensor) {
  const int64_t s = tensor.dims()[1], h = tensor.dims()[2], d = tensor.dims()[3];
  return {s * h * d, h * d, d};
}

paddle::Tensor zeros(const std::vector<int64_t>& dims, paddle::DataType dtype,
                     const paddle::Tensor& like) {
  paddle::Tensor tensor = paddle::empty(dims, dtype, like.place());
  const size_t num_bytes = tensor.numel() * phi::SizeOf(dtype);
  if (num_bytes != 0) backend_for(like).fill_zero(tensor.data(), num_bytes, stream_of(like));
  return tensor;
}

}  // namespace fm3::binding
