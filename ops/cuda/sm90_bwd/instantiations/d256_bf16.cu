// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90_bwd {
extern const BwdKernel kBwdD256Bf16 =
    make_kernel<WideConfig<__nv_bfloat16, 256, 256>>(DType::kBFloat16);
}
