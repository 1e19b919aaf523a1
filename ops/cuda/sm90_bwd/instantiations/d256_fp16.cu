// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90_bwd {
extern const BwdKernel kBwdD256Fp16 = make_kernel<WideConfig<__half, 256, 256>>(DType::kFloat16);
}
