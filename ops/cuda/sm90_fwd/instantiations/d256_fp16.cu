// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90 {
extern const FwdKernel kFwdD256Fp16 = make_kernel<256, 256, __half>(DType::kFloat16);
}
