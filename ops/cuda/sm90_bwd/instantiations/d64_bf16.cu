// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90_bwd {
extern const BwdKernel kBwdD64Bf16 = make_kernel<TwoStepConfig<__nv_bfloat16>>(DType::kBFloat16);
}
