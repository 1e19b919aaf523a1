// SPDX-License-Identifier: Apache-2.0
// Says while the kernel runs that the gradients of the last key tiles are all written (BwdParams::sent_word):
// context parallelism sends these to the ranks that own the keys.
//
// Claim:      who sees the word sees all of these rows.
// Because:    each warp, or for its group the thread that stored by TMA, counts a tile once its writes are complete,
//             and who counts the last one sets the word: releases and acquires in one chain.
// Breaks if:  a path of a consumer writes gradients and does not count, or counts twice: then the word never comes,
//             or too soon.
// Tested by:  test/gpu/test_sm90_bwd_remote.py
#pragma once

#include "dq.cuh"

namespace fm3::sm90_bwd {

__device__ __forceinline__ bool is_sent(const KernelArgs& args, const volatile TileInfo& tile) {
  return tile.flags & kItemRemote && args.sent_word != nullptr;
}

// `num_warps` of the tile's eight have written their rows. One thread, which sees these writes.
__device__ __forceinline__ void count_sent(const KernelArgs& args, int32_t num_warps) {
  __threadfence();
  if (add_acq_rel(args.sent_count, num_warps) + num_warps != __ldg(&args.plan->sent_warps)) return;
  __threadfence_system();
  ptx::store_release_system(args.sent_word, args.sent_value);
}

// After the whole warp's ordinary stores.
__device__ __forceinline__ void count_sent_warp(const KernelArgs& args, bool is_leader) {
  __threadfence();
  __syncwarp();
  if (is_leader) count_sent(args, 1);
}

// By the thread that has stored its group's rows by TMA.
__device__ __forceinline__ void count_sent_group(const KernelArgs& args) {
  ptx::bulk_wait<0>();
  fence_proxy_async_all();
  count_sent(args, 4);
}

}  // namespace fm3::sm90_bwd
