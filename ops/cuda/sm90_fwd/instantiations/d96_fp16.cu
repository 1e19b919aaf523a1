// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90 {
extern const FwdKernel kFwdD96Fp16 =
    make_kernel<FwdConfig<96, 96, kItemCols, __half>>(DType::kFloat16);
}
