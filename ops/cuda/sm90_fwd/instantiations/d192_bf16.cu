// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90 {
extern const FwdKernel kFwdD192Bf16 = make_kernel<192, 192, __nv_bfloat16>(DType::kBFloat16);
}
