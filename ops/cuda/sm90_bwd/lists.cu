// SPDX-License-Identifier: Apache-2.0
// Makes a mask's lists in two launches, or three with the scan of its bounds.
#include <algorithm>

#include "../schedule/build.cuh"
#include "../schedule/with_form.cuh"
#include "args.h"
#include "list_kernels.cuh"

namespace fm3::sm90_bwd {

cudaError_t make_lists(const MaskView& mask, const MaskLists& lists, cudaStream_t stream) {
  if (lists.scan_totals != nullptr) {
    sm90::ScheduleView scan = {};
    scan.totals = static_cast<sm90::ScheduleTotals*>(lists.scan_totals);
    scan.hulls = lists.scan.hulls, scan.granules = lists.scan.granules;
    scan.num_hulls = lists.scan.num_hulls;
    const cudaError_t error = sm90::scan_bounds(mask, scan, stream);
    if (error != cudaSuccess) return error;
  }
  const ListGrids grids = list_grids(mask, lists);
  return sm90::with_form(mask.form, [&](auto form) {
    visit_kernel<form>
        <<<grids.fold_ctas + lists.num_tile_lists * grids.visit_ctas, kVisitThreads, 0, stream>>>(
            mask, lists, grids);
    list_kernel<<<lists.num_tile_lists*(grids.order_ctas + grids.visitor_ctas), sm90::kRankThreads,
                  0, stream>>>(lists, grids);
    return cudaGetLastError();
  });
}

}  // namespace fm3::sm90_bwd
