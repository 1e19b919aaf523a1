// SPDX-License-Identifier: Apache-2.0
#include "../launch.cuh"

namespace fm3::sm90 {
extern const FwdKernel kFwdD256Fp16 =
    make_kernel<FwdConfig<256, 256, kItemCols / 2, __half>>(DType::kFloat16);
}
