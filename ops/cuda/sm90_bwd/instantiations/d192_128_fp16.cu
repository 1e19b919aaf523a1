// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90_bwd {
extern const BwdKernel kBwdD192V128Fp16 =
    make_kernel<TallConfig<__half, 192, 128>>(DType::kFloat16);
}
