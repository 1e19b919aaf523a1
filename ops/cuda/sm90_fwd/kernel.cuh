// SPDX-License-Identifier: Apache-2.0
// The forward kernel: persistent CTAs of one producer and two consumer warpgroups.
//
//   loader warp   claims a query tile, walks its spans, copies Q, K, V by TMA two steps ahead
//   mask warps    for partial steps: bounds -> bits, up to four steps ahead
//   consumers     64 rows each, taking turns on the tensor cores
#pragma once

#include "consumer.cuh"
#include "producer.cuh"

namespace fm3::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdArgs args) {
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_raw);
  // Swizzled tiles need the alignment that the declaration asks for.
  if (ptx::smem_addr(smem_raw) % 1024 != 0) __trap();
  if (threadIdx.x == 0) {
    constexpr int kGroupWarps = 4, kConsumerWarps = kGroupWarps * Config::kNumConsumers;
    for (int group = 0; group < Config::kNumConsumers; ++group) {
      ptx::mbar_init(&smem.q_full[group], 1);
      ptx::mbar_init(&smem.q_empty[group], kGroupWarps);
    }
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbar_init(&smem.k_full[stage], 1);
      ptx::mbar_init(&smem.v_full[stage], 1);
      ptx::mbar_init(&smem.k_empty[stage], kConsumerWarps);
      ptx::mbar_init(&smem.v_empty[stage], kConsumerWarps);
    }
    for (int slot = 0; slot < Config::kMaskSlots; ++slot) {
      ptx::mbar_init(&smem.mask_full[slot], Config::kMaskWarps);
      ptx::mbar_init(&smem.mask_empty[slot], kConsumerWarps);
    }
    for (int slot = 0; slot < Config::kTileSlots; ++slot) {
      ptx::mbar_init(&smem.tile_full[slot], 1);
      ptx::mbar_init(&smem.tile_empty[slot], Config::kMaskWarps);
    }
    ptx::fence_mbar_init();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::reg_dealloc<Config::kProducerRegs>();
    const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      Loader<Config>(args, smem).run();
    } else {
      MaskMaker<Config>(args, smem, warp - 1).run();
    }
  } else {
    ptx::reg_alloc<Config::kConsumerRegs>();
    Consumer<Config>(args, smem, warpgroup - 1).run();
  }
}

}  // namespace fm3::sm90
