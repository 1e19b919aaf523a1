// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include "backend.h"

namespace fm3::binding {

Strides contiguous_strides(int64_t s, int64_t h, int64_t d) { return {s * h * d, h * d, d}; }

paddle::Tensor contiguous(const paddle::Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
#if FM3_PADDLE_MAJOR >= 3
  return tensor.contiguous();
#else
  PD_THROW("fm3_attention: a strided tensor needs Paddle 3 or newer; pass tensor.contiguous()");
#endif
}

ReadableTensor::ReadableTensor(const paddle::Tensor& tensor) : tensor_(tensor) {
  const auto is_readable = [](const paddle::Tensor& candidate) {
    return candidate.dims()[3] <= 1 || candidate.strides()[3] == 1;
  };
  if (!is_readable(tensor_)) tensor_ = contiguous(tensor_);
  strides_ = {tensor_.strides()[0], tensor_.strides()[1], tensor_.strides()[2]};
}

paddle::Tensor zeros(const std::vector<int64_t>& dims, paddle::DataType dtype,
                     const paddle::Tensor& like) {
  paddle::Tensor tensor = paddle::empty(dims, dtype, like.place());
  const size_t num_bytes = tensor.numel() * phi::SizeOf(dtype);
  if (num_bytes != 0) backend_for(like).fill_zero(tensor.data(), num_bytes, stream_of(like));
  return tensor;
}

}  // namespace fm3::binding
