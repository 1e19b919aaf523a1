// SPDX-License-Identifier: Apache-2.0
// The custom op `fm3_attention` and its gradient, as the framework sees them. Paddle itself owns the
// names flashmask_attention and flashmask_attention_v2.
#include "backward.h"
#include "forward.h"
#include "infer.h"
#if FM3_PADDLE_MAJOR >= 3
#include "spmd.h"
#endif

PD_BUILD_OP(fm3_attention)
    .Inputs({"q", "k", "v", "startend_row_indices", "block_mask"})
    .Outputs({"out", "lse"})
    .Attrs({"softmax_scale: float", "is_causal: bool", "is_deterministic: bool"})
    .SetKernelFn(PD_KERNEL(fm3::binding::attention_forward))
    .SetInferShapeFn(PD_INFER_SHAPE(fm3::binding::infer_forward_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(fm3::binding::infer_forward_dtype))
#if FM3_PADDLE_MAJOR >= 3
    .SetInferSpmdFn(fm3::binding::kForwardSpmd)
#endif
    ;

PD_BUILD_GRAD_OP(fm3_attention)
    .Inputs({"q", "k", "v", "startend_row_indices", "block_mask", "out", "lse", paddle::Grad("out"),
             paddle::Grad("lse")})
    .Outputs({paddle::Grad("q"), paddle::Grad("k"), paddle::Grad("v")})
    .Attrs({"softmax_scale: float", "is_causal: bool", "is_deterministic: bool"})
    .SetKernelFn(PD_KERNEL(fm3::binding::attention_backward))
    .SetInferShapeFn(PD_INFER_SHAPE(fm3::binding::infer_backward_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(fm3::binding::infer_backward_dtype))
#if FM3_PADDLE_MAJOR >= 3
    .SetInferSpmdFn(fm3::binding::kBackwardSpmd)
#endif
    ;
