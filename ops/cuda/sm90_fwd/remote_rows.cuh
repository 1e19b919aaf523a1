// SPDX-License-Identifier: Apache-2.0
// Key rows that arrive while the kernel runs: context parallelism starts on a rank's own rows and
// takes those of other ranks as copy engines bring them.
#pragma once

#include <cstdint>

namespace fm3::sm90 {

constexpr uint32_t kPollNs = 200;  // beside the two loads of a poll, some 0.4 us each

__device__ __forceinline__ int32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return static_cast<int32_t>(value);
}

// Claim:      a K or V row is copied to shared memory only after it has arrived, but for keys behind a short tile of the
//             backward (cuts.h), which are the next one's: their bounds hide every pair, and hidden.cuh clears them.
// Because:    rows arrive in the order of the key buffer, `ready_rows` is written after them, the
//             load acquires it, and the proxy fence orders it before the issuing lane's TMA loads.
// Breaks if:  rows arrive out of order, or another lane than the caller issues the loads.
// Tested by:  test/gpu/test_cp_remote_rows.py, test/gpu/test_sm90_bwd_remote.py (keys are NaN until they arrive)
//
// Until key rows [0, k_end) are in. Called by a whole warp (a loop in one lane alone costs spilled
// convergence barriers); `seen_rows` is the count that it knows of. Gives up after ready_polls polls,
// about a microsecond each, or at once if any CTA has: the status word says at which row. The kernel
// then runs on with whatever is in the buffer, so that it ends.
template <class Args>
__device__ __forceinline__ void wait_rows(const Args& args, int32_t num_rows, int32_t& seen_rows,
                                          int32_t k_end) {
  k_end = min(k_end, num_rows);
  if (k_end <= seen_rows) return;
  for (uint32_t polls = 0; k_end > (seen_rows = load_acquire(args.ready_rows)); ++polls) {
    if (polls > args.ready_polls) atomicCAS_system(args.ready_status, 0u, k_end);
    if (load_acquire(args.ready_status) != 0) {
      seen_rows = num_rows;
      break;
    }
    __nanosleep(kPollNs);
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
  __syncwarp();
}

}  // namespace fm3::sm90
