// SPDX-License-Identifier: Apache-2.0
// The forward kernel: persistent CTAs of one producer and two consumer warpgroups.
//
//   loader warp   claims a query tile, walks its spans, copies Q, K, V by TMA two steps ahead
//   mask warps    for partial steps: bounds -> bits, up to kMaskSlots steps ahead
//   consumers     64 rows each, taking turns on the tensor cores
//
// Compiled twice into one kernel: two CTAs of a cluster on neighbouring query tiles, each copying half of
// K and V into both (multicast), and each CTA for itself; the mask decides which runs (use_pairs). Once more
// for two CTAs on the same query tile of two heads that share a key head. And all that once more for query tiles that
// begin at documents (is_cut): there both run, pairs first, then each CTA on its own takes the tiles that are in none.
#pragma once

#include "consumer.cuh"
#include "mask_maker.cuh"
#include "producer.cuh"

namespace fm3::sm90 {

template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::Smem& smem) {
  constexpr int kGroupWarps = 4 * ptx::kWarpArrivals;
  constexpr int kConsumerWarps = kGroupWarps * Config::kNumConsumers;
  constexpr int kMaskWarps = Config::kMaskWarps * ptx::kWarpArrivals;
  for (int slot = 0; slot < Config::kQSlots; ++slot) {
    ptx::mbar_init(&smem.q_full[slot], 1);
    ptx::mbar_init(&smem.q_empty[slot], kGroupWarps);
  }
  for (int stage = 0; stage < Config::kStages; ++stage) {
    ptx::mbar_init(&smem.k_full[stage], 1);
    ptx::mbar_init(&smem.k_empty[stage], kConsumerWarps * Config::kTeam);
  }
  for (int stage = 0; stage < Config::kStagesV; ++stage) {
    ptx::mbar_init(&smem.v_full[stage], 1);
    ptx::mbar_init(&smem.v_empty[stage], kConsumerWarps * Config::kTeam);
  }
  for (int slot = 0; slot < Config::kMaskSlots; ++slot) {
    ptx::mbar_init(&smem.mask_full[slot], kMaskWarps);
    ptx::mbar_init(&smem.mask_empty[slot], kConsumerWarps);
  }
  for (int slot = 0; slot < Config::kTileSlots; ++slot) {
    ptx::mbar_init(&smem.tile_full[slot], 1);
    ptx::mbar_init(&smem.tile_empty[slot], kMaskWarps);
  }
  for (int slot = 0; slot < Config::kClaimSlots; ++slot) {
    ptx::mbar_init(&smem.claim_full[slot], 1);
  }
  ptx::fence_mbar_init();
}

// The barriers begin anew between pairs and the rest.
// Claim:      nobody waits at an old barrier or still arrives at one, and no copy is under way.
// Because:    all threads of both CTAs have parted with release and acquire (leave_team), behind their last wait and arrival; and
//             each copy has been waited for by those who use it.
// Breaks if:  the team parts relaxed: arrivals of the other CTA at k_empty of the last step, for which no loader waits, may
//             then count at the new barrier.
// Tested by:  test/unit/test_sm90_fwd_protocol.py (a model), test/gpu/test_sm90_fwd_cuts.py
template <class Before, class Behind>
__device__ __forceinline__ void restart_barriers(uint8_t* smem_raw) {
  using Smem = typename Behind::Smem;
  static_assert(sizeof(Smem) == sizeof(typename Before::Smem), "barriers stand where they stood");
  auto& smem = *reinterpret_cast<Smem*>(smem_raw);
  __syncthreads();
  if (threadIdx.x == 0) {
    for (auto* barrier = smem.q_full; barrier < smem.claim_full + Behind::kClaimSlots; ++barrier) {
      ptx::mbar_invalidate(barrier);
    }
    init_barriers<Behind>(smem);
  }
  __syncthreads();
}

// No CTA may end while the other still copies into it or arrives at its barriers. Where these begin anew, all arrivals must
// have come: the loader waits for those of the last step but one.
template <class Config>
__device__ __forceinline__ void leave_team() {
  if constexpr (Config::kIsPair) {
    __syncwarp();
    if constexpr (Config::kIsCut && Config::kTeamTiles == 2) {
      ptx::cluster_sync();
    } else {
      ptx::cluster_sync_relaxed();
    }
  }
}

template <class Config>
__device__ __forceinline__ void produce(const FwdArgs& args, uint8_t* smem_raw, int32_t rank,
                                        bool is_behind_pairs = false) {
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_raw);
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp == 0) {
    Loader<Config>(args, smem, rank).run(is_behind_pairs);
  } else {
    MaskMaker<Config>(args, smem, warp - 1).run();
  }
  leave_team<Config>();
}

template <class Config>
__device__ __forceinline__ void consume(const FwdArgs& args, uint8_t* smem_raw, int32_t rank,
                                        int group) {
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_raw);
  Consumer<Config>(args, smem, rank, group).run();
  leave_team<Config>();
}

// Pair: for neighbouring tiles; may be Own: such a kernel never pairs tiles.
template <class Own, class Pair>
__global__ void __launch_bounds__(Own::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdArgs args) {
  constexpr bool kHasPairs = Pair::kTeamTiles == 2;
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  // Swizzled tiles need the alignment that the declaration asks for.
  if (ptx::smem_addr(smem_raw) % 1024 != 0) __trap();
  if (is_cut(args) != Own::kIsCut) return;  // the other kernel's (launch.cuh)
  const bool is_pair = kHasPairs && use_pairs<Own::kIsCut>(args);
  constexpr bool kTakesRest = kHasPairs && Own::kIsCut;
  if (threadIdx.x == 0) {
    if (is_pair) {
      init_barriers<Pair>(*reinterpret_cast<typename Pair::Smem*>(smem_raw));
    } else {
      init_barriers<Own>(*reinterpret_cast<typename Own::Smem*>(smem_raw));
    }
  }
  __syncthreads();
  const bool is_team = Own::kIsPair || is_pair;
  const auto rank = is_team ? static_cast<int32_t>(ptx::cluster_cta_rank()) : 0;
  if (is_team) ptx::cluster_sync();

  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::reg_dealloc<Own::kProducerRegs>();
    if constexpr (kTakesRest) {
      if (is_pair) {
        produce<Pair>(args, smem_raw, rank);
        restart_barriers<Pair, Own>(smem_raw);
      }
      produce<Own>(args, smem_raw, rank, is_pair);
    } else if (kHasPairs && is_pair) {
      produce<Pair>(args, smem_raw, rank);
    } else {
      produce<Own>(args, smem_raw, rank);
    }
  } else {
    ptx::reg_alloc<Own::kConsumerRegs>();
    if constexpr (kTakesRest) {
      if (is_pair) {
        consume<Pair>(args, smem_raw, rank, warpgroup - 1);
        restart_barriers<Pair, Own>(smem_raw);
      }
      consume<Own>(args, smem_raw, rank, warpgroup - 1);
    } else if (kHasPairs && is_pair) {
      consume<Pair>(args, smem_raw, rank, warpgroup - 1);
    } else {
      consume<Own>(args, smem_raw, rank, warpgroup - 1);
    }
  }
}

}  // namespace fm3::sm90
