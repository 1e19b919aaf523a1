// SPDX-License-Identifier: Apache-2.0
// The persistent kernel: one CTA a multiprocessor, roles by warp.
#pragma once

#include "consumer.cuh"
#include "consumer_tall.cuh"
#include "consumer_two_steps.cuh"
#include "consumer_wide.cuh"
#include "dq_convert.cuh"
#include "loader.cuh"

namespace fm3::sm90_bwd {

template <class C>
__device__ __forceinline__ void init_barriers(Smem<C>& smem) {
  using ptx::kWarpArrivals;
  using ptx::mbar_init;
  for (int slot = 0; slot < 2; ++slot) {
    mbar_init(&smem.tile_full[slot], kWarpArrivals);
    mbar_init(&smem.tile_empty[slot], (kNumConsumerWarps + 1) * kWarpArrivals);
  }
  for (int slot = 0; slot < C::kQStages; ++slot) {
    mbar_init(&smem.q_full[slot], 1);
    mbar_init(&smem.q_empty[slot], kNumConsumerWarps * kWarpArrivals);
  }
  for (int slot = 0; slot < C::kDoutStages; ++slot) {
    mbar_init(&smem.dout_full[slot], 1);
    mbar_init(&smem.dout_empty[slot], kNumConsumerWarps * kWarpArrivals);
  }
  mbar_init(&smem.k_full, 1);
  mbar_init(&smem.v_full, 1);
  mbar_init(&smem.k_empty, kNumConsumerWarps * kWarpArrivals);
  mbar_init(&smem.v_empty, kNumConsumerWarps * kWarpArrivals);
  for (int slot = 0; slot < C::kDqBuffers; ++slot) {
    mbar_init(&smem.dq_full[slot], kNumConsumerWarps * kWarpArrivals);
  }
  for (int slot = 0; slot < C::kDqParts * C::kDqBuffers; ++slot) {
    mbar_init(&smem.dq_empty[slot], kWarpArrivals);
  }
  for (int slot = 0; slot < kBackBuffers; ++slot) {
    mbar_init(&smem.dq_back_full[slot], 1);
  }
  for (int slot = 0; slot < kNumEvents; ++slot) {
    mbar_init(&smem.event_full[slot], 1);
    mbar_init(&smem.event_empty[slot], kWarpArrivals);
  }
  if constexpr (C::kTakesTwo) {
    for (int slot = 0; slot < 2; ++slot) mbar_init(&smem.ds_full[slot], 4 * kWarpArrivals);
  }
  ptx::fence_mbar_init();
}

template <class C>
__global__ void __launch_bounds__(kNumThreads, 1)
    bwd_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(1024) char smem_raw[];
  Smem<C>& smem = *reinterpret_cast<Smem<C>*>(smem_raw);
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();

  const int32_t group_idx = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
  if (group_idx == 0) {
    ptx::reg_dealloc<kHelperRegs>();
    const int32_t warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (warp == kLoaderWarp) {
      run_loader<C>(args, smem);
    } else if (warp == kWriterWarp) {
      if (threadIdx.x % 32 == 0) DqWriter<C>(args, smem).run();
    } else if (warp == kCounterWarp) {
      run_dq_counter<C>(args, smem);
    } else {
      run_dq_converter<C>(args, smem);
    }
  } else {
    ptx::reg_alloc<kConsumerRegs>();
    if constexpr (C::kSplitsColumns) {
      run_wide_consumer<C>(args, smem);
    } else if constexpr (C::kIsTall) {
      run_tall_consumer<C>(args, smem);
    } else if constexpr (C::kTakesTwo) {
      run_two_step_consumer<C>(args, smem, group_idx - 1);
    } else {
      run_consumer<C>(args, smem, group_idx - 1);
    }
  }
}

}  // namespace fm3::sm90_bwd
