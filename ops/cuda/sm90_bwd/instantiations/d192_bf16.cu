// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90_bwd {
extern const BwdKernel kBwdD192Bf16 =
    make_kernel<WideConfig<__nv_bfloat16, 192, 192>>(DType::kBFloat16);
}
