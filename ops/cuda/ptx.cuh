// SPDX-License-Identifier: Apache-2.0
// Thin wrappers of the Hopper instructions both kernels are built from, one C++ function an
// instruction, no policy. Matrix instructions are in wgmma.cuh.
//
//   smem_addr            generic pointer -> 32-bit shared address
//   mbar_*               mbarrier: init, arrive, arrive with expected bytes, wait for a phase
//   tma_load_4d/store_4d bulk tensor copies of a [b, h, s, d] box (coordinates innermost first)
//   bulk_*               bulk copies without a tensor map, and the bulk group they complete in
//   fence_*              which proxy must see what before which
//   named_barrier_*      bar.sync / bar.arrive with an id of the caller's
//   reg_alloc/dealloc    setmaxnreg
//   stmatrix/ldmatrix    8x8 b16 matrices between registers and shared memory
//   copy_async_*         a thread's own copies from global to shared memory
//   store_release_system a word that streams, other GPUs and the host may wait for
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fm3::ptx {

__device__ __forceinline__ uint32_t smem_addr(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// After what this thread has written or seen written, for whoever reads the word.
__device__ __forceinline__ void store_release_system(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// 16 bytes from global to shared memory, beside the thread's other work; copy_async_wait waits for its own copies.
__device__ __forceinline__ void copy_async_16(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(smem_addr(to)),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// --- mbarrier ----------------------------------------------------------------------------------
using Barrier = uint64_t;  // lives in shared memory, 8-byte aligned

__device__ __forceinline__ void mbar_init(Barrier* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(barrier)), "r"(arrivals)
               : "memory");
}
// Before its memory becomes another barrier.
__device__ __forceinline__ void mbar_invalidate(Barrier* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(smem_addr(barrier)) : "memory");
}
// After the inits: makes them visible to the async proxy (and the cluster).
__device__ __forceinline__ void fence_mbar_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbar_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(barrier)) : "memory");
}
// How a warp arrives: one lane, once all have met (__syncwarp, or products that all waited for).
// racecheck cannot follow an order through such a meeting (tools/racecheck_control.cu), so in a build for
// it, -DFM3_ALL_LANES_ARRIVE, every lane arrives and barriers count as many.
#ifdef FM3_ALL_LANES_ARRIVE
constexpr uint32_t kWarpArrivals = 32;
#else
constexpr uint32_t kWarpArrivals = 1;
#endif
__device__ __forceinline__ bool arrives(bool is_leader) { return kWarpArrivals > 1 || is_leader; }
// The same without a branch, in code that ptxas must know to be converged.
__device__ __forceinline__ void mbar_arrive_if(bool arrives, Barrier* barrier) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %1, 0;\n @p mbarrier.arrive.shared::cta.b64 _, "
      "[%0];\n}\n" ::"r"(smem_addr(barrier)),
      "r"(static_cast<uint32_t>(arrives))
      : "memory");
}
// By one thread alone, at a barrier where others arrive as warps.
__device__ __forceinline__ void mbar_arrive_as_warp(Barrier* barrier) {
  if constexpr (kWarpArrivals == 1) {
    mbar_arrive(barrier);
  } else {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(barrier)),
                 "r"(kWarpArrivals)
                 : "memory");
  }
}
// For shared memory of CTA `cta_rank` of the cluster: the shared::cluster address of what this CTA
// has at `smem_address`.
__device__ __forceinline__ uint32_t map_to_cta(uint32_t smem_address, uint32_t cta_rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(mapped)
               : "r"(smem_address), "r"(cta_rank));
  return mapped;
}
__device__ __forceinline__ void mbar_arrive_at(uint32_t cluster_address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
}
// Stores 4 bytes in another CTA's shared memory and counts them at a barrier there.
__device__ __forceinline__ void store_async_b32(uint32_t cluster_address, int32_t value,
                                                uint32_t cluster_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   cluster_address),
               "r"(value), "r"(cluster_barrier)
               : "memory");
}
__device__ __forceinline__ void mbar_arrive_expect_tx(Barrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(barrier)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ bool mbar_try_wait(Barrier* barrier, uint32_t parity) {
  uint32_t is_done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(is_done)
      : "r"(smem_addr(barrier)), "r"(parity)
      : "memory");
  return is_done != 0;
}
// In builds that look for a hang, FM3_SPIN_LIMIT (cycles) turns one into a trap, instead of holding the
// device. Otherwise nothing.
class SpinLimit {
#ifdef FM3_SPIN_LIMIT
 public:
  __device__ __forceinline__ SpinLimit() { begin_ = clock64(); }
  __device__ __forceinline__ void check() const {
    if (clock64() - begin_ > FM3_SPIN_LIMIT) __trap();
  }

 private:
  long long begin_;
#else
 public:
  __device__ __forceinline__ void check() const {}
#endif
};

// Returns once the phase of this parity has completed.
__device__ __forceinline__ void mbar_wait(Barrier* barrier, uint32_t parity) {
  const SpinLimit limit;
  while (!mbar_try_wait(barrier, parity)) limit.check();
}

// The same for a converged warp, which stays converged. NOTE: after plain mbar_wait lanes may go on
// apart, and bar.arrive would then be executed once a part.
__device__ __forceinline__ void mbar_wait_warp(Barrier* barrier, uint32_t parity) {
  mbar_wait(barrier, parity);
  __syncwarp();
}

// True in one lane of a converged warp. ptxas knows that it is one: behind another condition it puts a loop over lanes
// round every TMA instruction.
__device__ __forceinline__ bool elect_one() {
  uint32_t is_elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xFFFFFFFF;\n selp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(is_elected));
  return is_elected != 0;
}
// A value that is the same in all lanes, for ptxas to know it: operands of TMA come from uniform registers.
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(0xFFFFFFFF, value, 0);
}

// --- Fences ------------------------------------------------------------------------------------
// Ordinary shared-memory writes of this thread become visible to TMA and wgmma (then a barrier).
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- TMA ---------------------------------------------------------------------------------------
// L2 policies as TMA takes them (createpolicy's encodings).
constexpr uint64_t kEvictNormal = 0x1000000000000000;
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictLast = 0x14F0000000000000;

// Box of `map` at (c0, c1, c2, c3), c0 innermost; may start below 0 or end past the tensor: such
// elements are zero-filled and still counted in the barrier's bytes.
__device__ __forceinline__ void tma_load_4d(uint32_t smem_dst, const CUtensorMap* map,
                                            uint32_t barrier, int32_t c0, int32_t c1, int32_t c2,
                                            int32_t c3, uint64_t l2_policy = kEvictNormal) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_dst),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "l"(l2_policy)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d(void* smem_dst, const CUtensorMap* map,
                                            Barrier* barrier, int32_t c0, int32_t c1, int32_t c2,
                                            int32_t c3, uint64_t l2_policy = kEvictNormal) {
  tma_load_4d(smem_addr(smem_dst), map, smem_addr(barrier), c0, c1, c2, c3, l2_policy);
}
// Brings a box into L2 only.
__device__ __forceinline__ void tma_prefetch_4d(const CUtensorMap* map, int32_t c0, int32_t c1,
                                                int32_t c2, int32_t c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
// The same box into the same offset of every CTA in `cta_mask`, each CTA's own barrier counting.
__device__ __forceinline__ void tma_load_4d_multicast(void* smem_dst, const CUtensorMap* map,
                                                      Barrier* barrier, uint16_t cta_mask,
                                                      int32_t c0, int32_t c1, int32_t c2,
                                                      int32_t c3,
                                                      uint64_t l2_policy = kEvictNormal) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%4, %5, %6, %7}], [%2], %3, %8;" ::"r"(smem_addr(smem_dst)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_addr(barrier)), "h"(cta_mask), "r"(c0),
      "r"(c1), "r"(c2), "r"(c3), "l"(l2_policy)
      : "memory");
}
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, const void* smem_src,
                                             int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          reinterpret_cast<uint64_t>(map)),
      "r"(smem_addr(smem_src)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// gmem[i] += smem[i] in fp32; bytes a multiple of 16, both sides 16-byte aligned.
__device__ __forceinline__ void bulk_reduce_add_f32(float* gmem_dst, const void* smem_src,
                                                    uint32_t bytes, uint64_t l2_policy) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, "
      "%3;" ::"l"(gmem_dst),
      "r"(smem_addr(smem_src)), "r"(bytes), "l"(l2_policy)
      : "memory");
}
// gmem[i] = smem[i], likewise.
__device__ __forceinline__ void bulk_store(void* gmem_dst, const void* smem_src, uint32_t bytes,
                                           uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          gmem_dst),
      "r"(smem_addr(smem_src)), "r"(bytes), "l"(l2_policy)
      : "memory");
}
// Plain bulk load of `bytes` (multiple of 16, both sides 16-byte aligned).
__device__ __forceinline__ void bulk_load(uint32_t smem_dst, const void* gmem_src, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_dst),
      "l"(gmem_src), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void bulk_load(void* smem_dst, const void* gmem_src, uint32_t bytes,
                                          Barrier* barrier) {
  bulk_load(smem_addr(smem_dst), gmem_src, bytes, smem_addr(barrier));
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most kPending of this thread's bulk groups still read their shared source.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until at most kPending of this thread's bulk groups are not complete (writes visible).
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- Warpgroup control -------------------------------------------------------------------------
__device__ __forceinline__ void named_barrier_sync(int32_t id, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int32_t id, int32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int kRegs>
__device__ __forceinline__ void reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegs));
}
template <int kRegs>
__device__ __forceinline__ void reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegs));
}

// --- Clusters ----------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t cluster_cta_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// The same without ordering memory: only that all have come here.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::
                   : "memory");
}

// --- Matrix moves ------------------------------------------------------------------------------
// `smem_row`: the address of one row of the four, each lane's own.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem_row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t smem_row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_row)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(const void* smem_src, uint32_t (&r)[4]) {
  ldmatrix_x4(smem_addr(smem_src), r);
}

// D[16, 8] += A[16, 16] B[16, 8] by one warp, T in, fp32 out; fragments as wgmma.cuh's, 16 rows.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                     uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- Arithmetic --------------------------------------------------------------------------------
// The value is computed here, not where it is used.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)); }
// One unit in the last place, without the branches of division.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two floats to one register of T, `low` in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// a b + c of the two T in a register.
template <class T>
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c);
template <>
__device__ __forceinline__ uint32_t fma2<__nv_bfloat16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
template <>
__device__ __forceinline__ uint32_t fma2<__half>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

}  // namespace fm3::ptx
