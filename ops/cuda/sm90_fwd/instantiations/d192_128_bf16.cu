// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90 {
extern const FwdKernel kFwdD192V128Bf16 = make_kernel<192, 128, __nv_bfloat16>(DType::kBFloat16);
}
