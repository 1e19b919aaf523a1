// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90_bwd {
extern const BwdKernel kBwdD128Bf16 =
    make_kernel<Config<__nv_bfloat16, 128, 128>>(DType::kBFloat16);
}
