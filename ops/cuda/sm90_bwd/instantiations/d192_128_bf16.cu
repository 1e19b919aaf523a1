// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90_bwd {
extern const BwdKernel kBwdD192V128Bf16 =
    make_kernel<TallConfig<__nv_bfloat16, 192, 128>>(DType::kBFloat16);
}
