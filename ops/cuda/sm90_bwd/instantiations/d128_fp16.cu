// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90_bwd {
extern const BwdKernel kBwdD128Fp16 = make_kernel<Config<__half, 128, 128>>(DType::kFloat16);
}
