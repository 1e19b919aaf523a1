// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90 {
extern const FwdKernel kFwdD192Fp16 = make_kernel<192, 192, __half>(DType::kFloat16);
}
