// SPDX-License-Identifier: Apache-2.0
// Makes a mask's lists in four launches, or two if its key tiles stay on the grid.
#include <algorithm>

#include "../schedule/with_form.cuh"
#include "args.h"
#include "list_kernels.cuh"

namespace fm3::sm90_bwd {

cudaError_t make_lists(const MaskView& mask, const MaskLists& lists, cudaStream_t stream) {
  const ListGrids grids = list_grids(mask, lists);
  return sm90::with_form(mask.form, [&](auto form) {
    if constexpr (form != BoundForm::kNone) {  // without bounds there are no documents
      if (grids.border_ctas > 0) {
        border_kernel<form><<<grids.border_ctas, kVisitThreads, 0, stream>>>(mask, lists, grids);
        cut_kernel<form><<<grids.cut_ctas, kVisitThreads, 0, stream>>>(mask, lists, grids);
      }
    }
    visit_kernel<form>
        <<<lists.num_tile_lists * grids.visit_ctas, kVisitThreads, 0, stream>>>(mask, lists, grids);
    list_kernel<<<lists.num_tile_lists*(grids.order_ctas + grids.visitor_ctas), sm90::kRankThreads,
                  0, stream>>>(lists, grids);
    return cudaGetLastError();
  });
}

}  // namespace fm3::sm90_bwd
