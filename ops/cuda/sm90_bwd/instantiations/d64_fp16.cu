// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90_bwd {
extern const BwdKernel kBwdD64Fp16 = make_kernel<TwoStepConfig<__half>>(DType::kFloat16);
}
