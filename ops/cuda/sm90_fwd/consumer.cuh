// SPDX-License-Identifier: Apache-2.0
// One consumer warpgroup: 64 query rows. It sees one endless stream of steps; query tiles follow
// each other in it without a gap.
#pragma once

#include "../softmax.cuh"
#include "revisit.cuh"
#include "tile_lists.cuh"

namespace fm3::sm90 {

template <class Config>
class Consumer {
  using T = typename Config::T;
  using Smem = typename Config::Smem;
  using Step = typename Config::Step;
  static constexpr int kCols = Config::kCols;
  static constexpr int kShortCols = Config::kShortCols;
  // Wide heads leave half an item out and have no short steps. Pairs of 176 columns have none either, but the code for
  // them: without it ptxas gives the whole kernel other registers, and 8K causal takes 2.6 % more cycles.
  static constexpr bool kAlike = Config::kStepsPerItem == 2;
  static constexpr int kRegsS = kCols / 2, kRegsO = Config::kHeadV / 2, kRegsP = kCols / 4;
  using MmaPv = ptx::Wgmma<Config::kHeadV, T, false, true>;

 public:
  __device__ __forceinline__ Consumer(const FwdArgs& args, Smem& smem, int32_t rank, int group)
      : args_(args),
        smem_(smem),
        group_(group),
        warp_(threadIdx.x / 32 % 4),
        lane_(threadIdx.x % 32) {
    const uint32_t base = ptx::smem_addr(&smem);
    if (group == 1) next_q_.next();
    if constexpr (Config::kIsPair) to_other_ = ptx::map_to_cta(base, rank ^ 1) - base;
  }

  // For step j of the stream, with j - 1 possibly the last of another query tile:
  //   issue S_j = Q K_j^T ; issue O += P_{j-1} V_{j-1} ; let the other group issue its own
  //   wait S_j ; mask it ; most of P_j = exp2(S_j - m) while O is still multiplying
  //   wait O ; if j began a tile: write out the finished one, else rescale O if m grew
  //   the rest of P_j, and all of it to the registers that O has read
  // so the epilogue of a tile runs while the other group multiplies, and the tensor cores see the
  // next tile's first product before it. One path for all whole steps: what is rare is a branch in it. A tile's last
  // step may be short; it and the step after it have paths of their own.
  // NOTE: all warps of a group must wait for O at the same instruction.
  __device__ __forceinline__ void run() {
    if (lane_ == 0) *revisit_head() = kNoBlock;
    run_stream();
    revisit<Config>(args_, revisit_head());
  }

 private:
  __device__ __forceinline__ void run_stream() {
    Stream stream(args_.scale_log2);

    // The other group's turn comes first for group 1.
    if (group_ == 1) ptx::named_barrier_arrive(1, 256);
    int32_t flags = wait_step();
    if (flags & Config::kEnd) {
      if (group_ == 0) ptx::named_barrier_sync(1, 256);
      return;
    }
    begin_tile();
    wait_q();
    float own_s[kRegsS];
    auto& acc_s = pick_s(stream.acc_s, own_s);
    issue_qk(acc_s);
    const uint8_t* bits = wait_mask(flags);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc_s);
    mask_scores(flags, bits, acc_s);
    const int32_t next_flags = next_step();
    release_qk(flags);
    stream.softmax.follow_maximum(acc_s);
    stream.softmax.template exponentiate_any<T>(acc_s, stream.reg_p);
    stream.has_reference = stream.softmax.has_reference();
    stream.flags = next_flags;
    // After a short step comes a whole one, its tile's first.
    while (true) {
      while (!(stream.flags & (Config::kEnd | (kAlike ? 0 : Config::kShort)))) {
        take_step<kCols, kCols, Begins::kMaybe>(stream);
      }
      if (kAlike || (stream.flags & Config::kEnd)) {
        finish_last_tile<kCols>(stream);
        break;
      }
      if constexpr (!kAlike) {
        take_step<kShortCols, kCols, Begins::kNever>(stream);
        if (stream.flags & Config::kEnd) {
          finish_last_tile<kShortCols>(stream);
          break;
        }
        take_step<kCols, kShortCols, Begins::kAlways>(stream);
      }
    }
    // Both groups took the same number of turns; this takes back group 1's opening arrival.
    if (group_ == 0) ptx::named_barrier_sync(1, 256);
  }

  // What one step hands to the next.
  struct Stream {
    float acc_s[kAlike ? kRegsS : 1];
    float acc_o[kRegsO];
    uint32_t reg_p[kRegsP];
    RowSoftmax softmax;
    int32_t flags = 0;  // of the step to come
    bool has_reference = false;
    int32_t scale_o = 0;  // 0: the next P V overwrites O
    __device__ __forceinline__ explicit Stream(float scale_log2) : softmax(scale_log2) {}
  };

  // Whether the step is its tile's first.
  enum class Begins { kNever, kMaybe, kAlways };

  // One step of kColsS columns, while the one before of kColsP multiplies.
  template <int kColsS, int kColsP, Begins kBegins>
  __device__ __forceinline__ void take_step(Stream& stream) {
    float own_s[kColsS / 2];
    auto& acc_s = pick_s(stream.acc_s, own_s);
    auto& reg_p = reinterpret_cast<uint32_t (&)[kColsS / 4]>(stream.reg_p);
    auto& reg_p_before = reinterpret_cast<uint32_t (&)[kColsP / 4]>(stream.reg_p);
    auto& acc_o = stream.acc_o;
    auto& softmax = stream.softmax;
    const int32_t flags = stream.flags;
    const bool is_new_tile =
        kBegins == Begins::kAlways || (kBegins == Begins::kMaybe && (flags & Config::kFirst));
    int32_t next_flags = 0;
    if (is_new_tile) wait_q();
    ptx::named_barrier_sync(1 + group_, 256);
    issue_qk(acc_s);
    ptx::mbar_wait_warp(&smem_.v_full[v_pos_.slot], v_pos_.parity);
    issue_pv(acc_o, reg_p_before, stream.scale_o);
    ptx::named_barrier_arrive(2 - group_, 256);
    const uint8_t* const bits = wait_mask(flags);
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(acc_s);
    mask_scores(flags, bits, acc_s);
    const RowSoftmax finished = softmax;
    if (is_new_tile) softmax.start_tile();
    // A mask that cannot be read again leaves no way back to the scores.
    const bool is_search = is_new_tile || !stream.has_reference ||
                           (Config::kMaskSlots == 1 && (flags & Config::kPartial));
    if (is_search) {
      softmax.follow_maximum(acc_s);
      stream.has_reference = softmax.has_reference();
    }
    const bool is_good = softmax.template exponentiate<T, Config::kHoldsBlocks>(
        acc_s, reg_p, is_search, args_.needs_prescale, [&]() {
          finish_pv(acc_o);
          if (is_search) {
            if (is_new_tile) {
              write_tile(finished, acc_o);
              begin_tile();
            } else {
              softmax.rescale(acc_o);
            }
          }
          next_flags = next_step();
        });
    if (!is_good) {
      compute_scores_again(acc_s);
      mask_scores(flags, wait_mask(flags), acc_s);
      softmax.follow_maximum(acc_s);
      softmax.rescale(acc_o);
      softmax.template exponentiate_any<T>(acc_s, reg_p);
    }
    release_qk(flags);
    stream.scale_o = is_new_tile ? 0 : 1;
    stream.flags = next_flags;
  }

  // Where all steps are alike they share one array: fewer registers. Where not, each has its own: one would be kept whole
  // through a short step.
  template <int kRegs>
  static __device__ __forceinline__ auto& pick_s(float (&all)[kRegs], float (&)[kRegs]) {
    return all;
  }
  template <int kOther, int kRegs>
  static __device__ __forceinline__ auto& pick_s(float (&)[kOther], float (&own)[kRegs]) {
    return own;
  }

  // P V of the last step of all.
  template <int kColsP>
  __device__ __forceinline__ void finish_last_tile(Stream& stream) {
    ptx::mbar_wait_warp(&smem_.v_full[v_pos_.slot], v_pos_.parity);
    issue_pv(stream.acc_o, reinterpret_cast<uint32_t (&)[kColsP / 4]>(stream.reg_p),
             stream.scale_o);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(stream.acc_o);
    write_tile(stream.softmax, stream.acc_o);
  }

  // What follows from it is computed where it is used, not kept in registers through the loop.
  static __device__ __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }

  // Waits for the next K; the flags of its step.
  __device__ __forceinline__ int32_t wait_step() {
    ptx::mbar_wait_warp(&smem_.k_full[k_pos_.slot], k_pos_.parity);
    return smem_.step[k_pos_.slot].flags;
  }
  // The same for the step after the one at hand, whose K is then the one before in the ring.
  __device__ __forceinline__ int32_t next_step() {
    k_pos_.next();
    return wait_step();
  }
  // The step at hand is its tile's first: which tile it is, for when it is written out. In shared memory, because
  // registers are scarce.
  __device__ __forceinline__ void begin_tile() {
    __syncwarp();
    if (lane_ == 0) *own_tile() = smem_.step[k_pos_.slot];
    __syncwarp();
  }
  __device__ __forceinline__ Step* own_tile() {
    return &smem_.own_tile[opaque(threadIdx.x) / 32 - 4];
  }
  __device__ __forceinline__ void wait_q() {
    ptx::mbar_wait_warp(&smem_.q_full[next_q_.slot], next_q_.parity);
    q_slot_ = next_q_.slot;
    next_q_.next();
    next_q_.next();
  }
  __device__ __forceinline__ void release(ptx::Barrier* barrier) {
    __syncwarp();
    if (ptx::arrives(lane_ == 0)) ptx::mbar_arrive(barrier);
  }

  __device__ __forceinline__ int32_t* revisit_head() {
    return &smem_.revisit_head[opaque(threadIdx.x) / 32 - 4];
  }

  // To the loaders of both CTAs in a pair, because each copies into both.
  __device__ __forceinline__ void release_kv(ptx::Barrier* barrier) {
    __syncwarp();
    if (ptx::arrives(lane_ == 0)) {
      ptx::mbar_arrive(barrier);
      if constexpr (Config::kIsPair) ptx::mbar_arrive_at(ptx::smem_addr(barrier) + to_other_);
    }
  }

  template <int kRegs>
  __device__ __forceinline__ void issue_qk(float (&acc_s)[kRegs]) {
    const uint64_t desc_q = ptx::wgmma_desc(ptx::smem_addr(smem_.q[q_slot_]));
    const uint64_t desc_k = ptx::wgmma_desc(ptx::smem_addr(smem_.k[k_pos_.slot]));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kHeadQk / 16; ++step) {
      const int panel = step / 4, bytes = step % 4 * 32;
      ptx::Wgmma<2 * kRegs, T>::ss(
          acc_s, ptx::advance(desc_q, panel * Config::kRowsPerGroup * 128 + bytes),
          ptx::advance(desc_k, panel * kCols * 128 + bytes), step > 0);
    }
    ptx::wgmma_commit();
  }

  template <int kRegs>
  __device__ __forceinline__ void issue_pv(float (&acc_o)[kRegsO], uint32_t (&reg_p)[kRegs],
                                           int32_t scale_o) {
    const uint64_t desc_v = ptx::wgmma_desc_mn(ptx::smem_addr(smem_.v[v_pos_.slot]), kCols * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRegs / 4; ++step) {
      MmaPv::rs(acc_o, reg_p[4 * step], reg_p[4 * step + 1], reg_p[4 * step + 2],
                reg_p[4 * step + 3], ptx::advance(desc_v, step * 2048), step > 0 ? 1 : scale_o);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void finish_pv(float (&acc_o)[kRegsO]) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc_o);
    if constexpr (Config::kStagesV == 1) release_kv(&smem_.v_empty[v_pos_.slot]);
    v_pos_.next();
  }

  template <int kRegs>
  __device__ __forceinline__ void prescale(float (&acc_s)[kRegs]) {
    if (args_.needs_prescale) {
#pragma unroll
      for (int reg = 0; reg < kRegs; ++reg) acc_s[reg] *= args_.prescale;
    }
  }

  // S = Q K^T of this warp's 16 rows once more, by the warp alone; Q and K are still in place. The
  // rare way out of a reference that was too low.
  template <int kRegs>
  __device__ __forceinline__ void compute_scores_again(float (&acc_s)[kRegs]) {
#pragma unroll
    for (int reg = 0; reg < kRegs; ++reg) acc_s[reg] = 0.0f;
    const int lane = opaque(lane_);
    const uint8_t* smem_q = smem_.q[q_slot_];
    const uint8_t* smem_k = smem_.k[k_pos_.last_slot()];
    // Lane l gives row l % 8 of 8x8 matrix l / 8: A wants (rows, k) blocks (0,0) (8,0) (0,8) (8,8),
    // two B blocks of 8 columns (0,0) (0,8) (8,0) (8,8).
    const int row_q = warp_ * 16 + lane % 16, chunk_q = lane / 16;
    const int row_k = lane % 8 + lane / 16 * 8, chunk_k = lane / 8 % 2;
#pragma unroll 1
    for (int step = 0; step < Config::kHeadQk / 16; ++step) {
      const int panel = step / 4, chunk = step % 4 * 2;  // 16-byte chunks of a 128-byte row
      uint32_t reg_q[4];
      ptx::ldmatrix_x4(smem_q + panel * Config::kRowsPerGroup * 128 + row_q * 128 +
                           (((chunk + chunk_q) ^ (row_q % 8)) * 16),
                       reg_q);
      const uint8_t* panel_k =
          smem_k + panel * kCols * 128 + row_k * 128 + (((chunk + chunk_k) ^ (row_k % 8)) * 16);
#pragma unroll
      for (int block = 0; block < kRegs / 8; ++block) {
        uint32_t reg_k[4];
        ptx::ldmatrix_x4(panel_k + block * 16 * 128, reg_k);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          float (&acc)[4] = *reinterpret_cast<float (*)[4]>(&acc_s[4 * (2 * block + part)]);
          ptx::mma_m16n8k16<T>(acc, reg_q, reg_k[2 * part], reg_k[2 * part + 1]);
        }
      }
    }
  }

  // Where the thread's own bits of a partial step's mask are, eight columns a byte.
  __device__ __forceinline__ const uint8_t* wait_mask(int32_t flags) {
    if (flags & Config::kPartial) {
      ptx::mbar_wait_warp(&smem_.mask_full[mask_pos_.slot], mask_pos_.parity);
    }
    const int row = group_ * Config::kRowsPerGroup + warp_ * 16 + opaque(lane_) / 4;
    return reinterpret_cast<const uint8_t*>(smem_.mask_bits[mask_pos_.slot][row]) + lane_ % 4;
  }

  // S is in registers: what the mask hides becomes -inf.
  template <int kRegs>
  __device__ __forceinline__ void mask_scores(int32_t flags, const uint8_t* bits,
                                              float (&acc_s)[kRegs]) {
    constexpr int kWords = (kRegs + 15) / 16;
    if (!(flags & (Config::kPartial | Config::kScaled))) return;
    prescale(acc_s);
    if (!(flags & Config::kPartial)) return;
    uint32_t own[2][kWords];  // bits of the thread's columns
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        own[half][word] = bits[(8 * half * Config::kMaskRowWords + word) * 4];
      }
    }
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int bit = 0; bit < 8; ++bit) {
          const int reg = 4 * (4 * word + bit / 2) + 2 * half + bit % 2;
          if (reg < kRegs && !(own[half][word] & (1u << bit))) acc_s[reg] = -INFINITY;
        }
      }
    }
    if constexpr (Config::kMaskSlots == 1) release_mask();  // at once: the next waits for it
  }

  __device__ __forceinline__ void release_mask() {
    release(&smem_.mask_empty[mask_pos_.slot]);
    mask_pos_.next();
  }

  // S and the mask have been read: let the producers have K, the mask's slot and, after a tile's last step, Q.
  __device__ __forceinline__ void release_qk(int32_t flags) {
    release_kv(&smem_.k_empty[k_pos_.last_slot()]);
    if (flags & Config::kLast) release(&smem_.q_empty[q_slot_]);
    if (Config::kMaskSlots > 1 && (flags & Config::kPartial)) release_mask();
  }

  // Straight from registers: neighbouring lanes swap halves so that each stores 8 bytes and four
  // lanes fill one 32-byte sector. No shared memory, so nothing of the next tile waits for it.
  __device__ __forceinline__ void write_tile(const RowSoftmax& softmax, float (&acc_o)[kRegsO]) {
    const Step step = *own_tile();
    const int32_t row =
        step.q_begin + group_ * Config::kRowsPerGroup + warp_ * 16 + opaque(lane_) / 4;
    const int32_t row_end = step.q_end(args_.s_q);
    const bool is_odd = lane_ & 1;
    bool is_bad = false;
    const int32_t col = (is_odd ? 8 : 0) + (lane_ & 2) * 2;
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = softmax.row_sum(half);
    // A row without a visible key is 0 even if O holds 0 * NaN.
    if (__any_sync(kAllLanes, sum[0] == 0.0f || sum[1] == 0.0f)) {
#pragma unroll
      for (int reg = 0; reg < kRegsO; ++reg) {
        if (sum[reg / 2 % 2] == 0.0f) acc_o[reg] = 0.0f;
      }
    }
    T* const out = static_cast<T*>(args_.out) + step.b_idx * args_.stride_out.b +
                   step.h_idx * args_.stride_out.h + row * args_.stride_out.s + col;  // [d_v - col]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = sum[half] == 0.0f ? 0.0f : ptx::reciprocal_approx(sum[half]);
      const bool is_row = row + 8 * half < row_end;
      const int32_t cols_left = is_row ? args_.d_v - col : 0;
      uint32_t trace[2] = {0, 0};  // NaN in a half if an output is not finite, else 0 or -0
      T* const out_row = out + half * 8 * args_.stride_out.s;
#pragma unroll
      for (int block = 0; block < Config::kHeadV / 8; block += 2) {
        auto packed = [&](int at) {
          const int reg = 4 * at + 2 * half;
          return ptx::pack2<T>(acc_o[reg] * inverse, acc_o[reg + 1] * inverse);
        };
        const uint32_t first = packed(block), second = packed(block + 1);
        trace[0] = ptx::fma2<T>(first, 0, trace[0]);
        trace[1] = ptx::fma2<T>(second, 0, trace[1]);
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, is_odd ? first : second, 1);
        const uint2 value = is_odd ? make_uint2(other, second) : make_uint2(first, other);
        if (8 * block < cols_left) *reinterpret_cast<uint2*>(out_row + 8 * block) = value;
      }
      is_bad |= is_row && ((trace[0] | trace[1]) & 0x7FFF7FFF) != 0 && isfinite(sum[half]);
    }
    if (lane_ % 4 == 0) {
      float* const lse =
          args_.lse + (int64_t{step.b_idx} * args_.h_q + step.h_idx) * args_.s_q + row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + 8 * half < row_end) lse[8 * half] = softmax.lse(half, sum[half], args_.scale);
      }
    }
    if (__any_sync(kAllLanes, is_bad)) {
      // Two forms: on the grid the other expression gives the loops other registers.
      const int32_t row = group_ * Config::kRowsPerGroup + warp_ * kRevisitRows;
      note_revisit(
          args_, revisit_head(),
          revisit_block(args_, step.b_idx, step.h_idx,
                        Config::kIsCut ? step.q_tile_idx() * kTileQ + row : step.q_begin + row));
    }
  }

  const FwdArgs& args_;
  Smem& smem_;
  int group_, warp_, lane_;
  uint32_t to_other_ = 0;  // from an address of this CTA to the same of the other
  RingPos<Config::kStages> k_pos_;
  RingPos<Config::kStagesV> v_pos_;
  RingPos<Config::kMaskSlots> mask_pos_;
  RingPos<Config::kQSlots> next_q_;  // of this group's next tile
  int32_t q_slot_ = 0;
};

}  // namespace fm3::sm90
