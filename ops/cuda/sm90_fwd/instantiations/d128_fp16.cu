// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90 {
extern const FwdKernel kFwdD128Fp16 = make_kernel<128, 128, __half>(DType::kFloat16);
}
