// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90_bwd {
extern const BwdKernel kBwdD64Bf16 = make_kernel<Config<__nv_bfloat16, 64, 64>>(DType::kBFloat16);
}
