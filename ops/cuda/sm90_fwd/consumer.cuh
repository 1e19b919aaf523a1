// SPDX-License-Identifier: Apache-2.0
// One consumer warpgroup: 64 query rows. It sees one endless stream of steps; query tiles follow
// each other in it without a gap.
#pragma once

#include <type_traits>

#include "../softmax.cuh"
#include "config.cuh"

namespace fm3::sm90 {

template <class Config>
class Consumer {
  using T = typename Config::T;
  using Smem = typename Config::Smem;
  using Step = typename Config::Step;
  static constexpr int kCols = Config::kCols;
  static constexpr int kRegsS = kCols / 2, kRegsO = Config::kHeadV / 2, kRegsP = kCols / 4;
  // P of a far too small m still fits bf16 (not fp16).
  static constexpr bool kMayKeepReference = std::is_same_v<T, __nv_bfloat16>;
  using MmaPv = ptx::Wgmma<Config::kHeadV, T, false, true>;

 public:
  __device__ __forceinline__ Consumer(const FwdArgs& args, Smem& smem, int group)
      : args_(args),
        smem_(smem),
        group_(group),
        warp_(threadIdx.x / 32 % 4),
        lane_(threadIdx.x % 32) {}

  // For step j of the stream, with j - 1 possibly the last of another query tile:
  //   issue S_j = Q K_j^T ; issue O += P_{j-1} V_{j-1}
  //   wait S_j ; mask it ; P_j = exp2(S_j - m) while O is still multiplying
  //   wait O ; if j began a tile: write out the finished one, else rescale O if m grew
  // so a tile's epilogue stands behind the next tile's first product. The two groups are not made to
  // take turns: they fall into turns by themselves (named barriers cost as much as they gave), and a
  // group that sees nothing of a step passes over it, or takes the half of the columns it sees.
  __device__ __forceinline__ void run() {
    float acc_s[kRegsS];
    float acc_o[kRegsO];
    uint32_t reg_p[kRegsP];
    RowSoftmax softmax(args_.scale_log2);

    Step step{};  // the last one taken
    int32_t parts = 0;
    int32_t scale_o = 0;  // 0: the next P V overwrites O
    bool has_tile = false;
    while (true) {
      // No product is pending. The first S of the kernel, or of a group that passed over several
      // steps and could not keep their V waiting.
      max_passed_ = kNoLimit;
      Step next = next_visible_step();
      if (next.flags & Config::kEnd) break;
      if (is_new_tile_) {
        if (has_tile) write_tile(step, softmax, acc_o);
        wait_q();
        softmax.start_tile();
        scale_o = 0;
      }
      parts = seen_parts(next);
      with_width(parts, [&](auto width) {
        issue_qk(width, acc_s, parts);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(first<width.regs_s()>(acc_s));
        release_k();
        finish_qk(width, next.flags, parts, acc_s);
        softmax.exponentiate(first<width.regs_s()>(acc_s));
        pack(width, acc_s, reg_p);
      });
      if (!is_new_tile_ && softmax.any_needs_rescale()) softmax.rescale(acc_o);
      is_new_tile_ = false;
      has_tile = true;
      step = next;
      max_passed_ = kMaxPassed;

      while (true) {
        next = next_visible_step();
        if (next.flags & (Config::kEnd | kMustFlush)) break;
        const bool is_new_tile = is_new_tile_;
        is_new_tile_ = false;
        if (is_new_tile) wait_q();
        const int32_t next_parts = seen_parts(next);
        // NOTE: from a product's issue to its wait there must be no join of paths that treat its
        // registers differently, or ptxas serialises (C7515).
        with_width(next_parts, [&](auto width) {
          with_width(parts, [&](auto width_p) {
            issue_qk(width, acc_s, next_parts);
            ptx::mbar_wait_warp(&smem_.v_full[v_pos_.slot], v_pos_.parity);
            issue_pv(width_p, acc_o, reg_p, parts, scale_o);
            ptx::wgmma_wait<1>();
            ptx::wgmma_pin(first<width.regs_s()>(acc_s));
          });
        });
        // NOTE: the waits for O stand behind branches that need the exponentials or their maxima.
        // In the same basic block ptxas moves them up, ahead of the softmax, and nothing overlaps.
        if (kMayKeepReference && !is_new_tile && next_parts == 3 &&
            !(next.flags & (Config::kLast | Config::kPartial)) && softmax.has_reference()) {
          prescale(acc_s);
          if (softmax.exponentiate_as_is(acc_s)) {
            finish_pv<0>(acc_o);
          } else {
            finish_pv<1>(acc_o);
            compute_scores_again(acc_s);
            prescale(acc_s);
            softmax.exponentiate(acc_s);
            softmax.rescale(acc_o);
          }
          release_k();
          scale_o = 1;
          pack(kWhole, acc_s, reg_p);
        } else {
          release_k();
          const RowSoftmax finished = softmax;
          if (is_new_tile) softmax.start_tile();
          with_width(next_parts, [&](auto width) {
            finish_qk(width, next.flags, next_parts, acc_s);
            softmax.exponentiate(first<width.regs_s()>(acc_s));
          });
          if (is_new_tile) {
            finish_pv<2>(acc_o);
            write_tile(step, finished, acc_o);
            scale_o = 0;
          } else if (softmax.any_needs_rescale()) {
            finish_pv<3>(acc_o);
            softmax.rescale(acc_o);
            scale_o = 1;
          } else {
            finish_pv<4>(acc_o);
            scale_o = 1;
          }
          with_width(next_parts, [&](auto width) { pack(width, acc_s, reg_p); });
        }
        step = next;
        parts = next_parts;
      }

      ptx::mbar_wait_warp(&smem_.v_full[v_pos_.slot], v_pos_.parity);
      with_width(parts, [&](auto width) {
        issue_pv(width, acc_o, reg_p, parts, scale_o);
        finish_pv<5>(acc_o);
      });
      scale_o = 1;
    }
    if (has_tile) write_tile(step, softmax, acc_o);
  }

 private:
  // How many of a step's columns a group computes: all, or one half.
  template <int kParts>
  struct Width {
    static constexpr int cols() { return kCols / 2 * kParts; }
    static constexpr int regs_s() { return cols() / 2; }
    static constexpr int regs_p() { return cols() / 4; }
  };
  static constexpr Width<2> kWhole{};
  // Beyond these head dims the compiler lacks the registers for both widths (C7511).
  static constexpr bool kHasHalves = kCols == 128 && Config::kHeadV > 64;

  template <class Body>
  static __device__ __forceinline__ void with_width(int32_t parts, const Body& body) {
    if constexpr (kHasHalves) {
      if (parts != 3) {
        body(Width<1>{});
        return;
      }
    }
    body(kWhole);
  }
  template <int kCount, int kAll, class Reg>
  static __device__ __forceinline__ Reg (&first(Reg (&regs)[kAll]))[kCount] {
    return *reinterpret_cast<Reg(*)[kCount]>(&regs);
  }

  __device__ __forceinline__ int32_t seen_parts(const Step& step) const {
    const int32_t parts = step.flags >> (Config::kPartsShift + 2 * group_) & 3;
    return kHasHalves || parts == 0 ? parts : 3;
  }

  // The next step this group sees something of, or kEnd. Sets is_new_tile_ if a tile began. With a
  // product pending (limit kMaxPassed) it stops at one step too many, which it leaves, and says
  // kMustFlush: the pending product holds a V slot, and the loader cannot go on behind it.
  // Claim:      passing over a step releases its K, V and mask slot exactly once, and never blocks.
  // Because:    each is released only after its full barrier, so the arrival cannot count for the
  //             phase before; V in order, after the V of the pending product. With P of step i
  //             pending and i + 1 passed, the loader issues K of i + 2 before it waits for V's slot
  //             of i. With two passed it can wait for that slot first: a deadlock.
  // Breaks if:  a query tile has no visible step for a group (the schedule gives it one).
  // Tested by:  test/unit/test_sm90_fwd_protocol.py (every interleaving it draws), test_sm90_fwd.py
  static constexpr int32_t kMaxPassed = 1, kNoLimit = 0x7FFFFFFF, kMustFlush = 1 << 30;

  __device__ __forceinline__ Step next_visible_step() {
    while (true) {
      ptx::mbar_wait_warp(&smem_.k_full[k_pos_.slot], k_pos_.parity);
      Step step = smem_.step[k_pos_.slot];
      if (step.flags & Config::kFirst) is_new_tile_ = true;
      if (step.flags & Config::kEnd || seen_parts(step) != 0) return step;
      if (num_passed_v_ == max_passed_) {
        step.flags = kMustFlush;
        return step;
      }
      release_k();
      if (step.flags & Config::kPartial) {
        ptx::mbar_wait_warp(&smem_.mask_full[mask_pos_.slot], mask_pos_.parity);
        release(&smem_.mask_empty[mask_pos_.slot]);
        mask_pos_.next();
      }
      if (step.flags & Config::kLast) release(&smem_.q_empty[group_]);
      ++num_passed_v_;
      if (max_passed_ == kNoLimit) drop_passed_v();
    }
  }
  __device__ __forceinline__ void drop_passed_v() {
    for (; num_passed_v_ > 0; --num_passed_v_) {
      ptx::mbar_wait_warp(&smem_.v_full[v_pos_.slot], v_pos_.parity);
      release(&smem_.v_empty[v_pos_.slot]);
      v_pos_.next();
    }
  }
  __device__ __forceinline__ void wait_q() {
    ptx::mbar_wait_warp(&smem_.q_full[group_], q_parity_);
    q_parity_ ^= 1;
  }
  __device__ __forceinline__ void release(ptx::Barrier* barrier) {
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive(barrier);
  }

  template <class W>
  __device__ __forceinline__ void issue_qk(W width, float (&acc_s)[kRegsS], int32_t parts) {
    const int32_t skipped_bytes = parts == 2 ? kCols / 2 * 128 : 0;
    const uint64_t desc_q = ptx::wgmma_desc(ptx::smem_addr(smem_.q[group_]));
    const uint64_t desc_k = ptx::wgmma_desc(ptx::smem_addr(smem_.k[k_pos_.slot]) + skipped_bytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kHeadQk / 16; ++step) {
      const int panel = step / 4, bytes = step % 4 * 32;
      ptx::Wgmma<width.cols(), T>::ss(
          first<width.regs_s()>(acc_s),
          ptx::advance(desc_q, panel * Config::kRowsPerGroup * 128 + bytes),
          ptx::advance(desc_k, panel * kCols * 128 + bytes), step > 0);
    }
    ptx::wgmma_commit();
  }

  template <class W>
  __device__ __forceinline__ void issue_pv(W width, float (&acc_o)[kRegsO],
                                           uint32_t (&reg_p)[kRegsP], int32_t parts,
                                           int32_t scale_o) {
    const int32_t skipped_bytes = parts == 2 ? kCols / 2 * 128 : 0;
    const uint64_t desc_v =
        ptx::wgmma_desc_mn(ptx::smem_addr(smem_.v[v_pos_.slot]) + skipped_bytes, kCols * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < width.cols() / 16; ++step) {
      MmaPv::rs(acc_o, reg_p[4 * step], reg_p[4 * step + 1], reg_p[4 * step + 2],
                reg_p[4 * step + 3], ptx::advance(desc_v, step * 2048), step > 0 ? 1 : scale_o);
    }
    ptx::wgmma_commit();
  }

  template <int kPlace>
  __device__ __forceinline__ void finish_pv(float (&acc_o)[kRegsO]) {
    ptx::wgmma_wait_here<kPlace>();
    ptx::wgmma_pin(acc_o);
    release(&smem_.v_empty[v_pos_.slot]);
    v_pos_.next();
    drop_passed_v();
  }

  __device__ __forceinline__ void release_k() {
    release(&smem_.k_empty[k_pos_.slot]);
    k_pos_.next();
  }

  __device__ __forceinline__ void prescale(float (&acc_s)[kRegsS]) {
    if (args_.needs_prescale) {
#pragma unroll
      for (int reg = 0; reg < kRegsS; ++reg) acc_s[reg] *= args_.prescale;
    }
  }

  // S = Q K^T of this warp's 16 rows once more, by the warp alone; Q and K are still in place. The
  // rare way out of `exponentiate_as_is`.
  __device__ __forceinline__ void compute_scores_again(float (&acc_s)[kRegsS]) {
#pragma unroll
    for (int reg = 0; reg < kRegsS; ++reg) acc_s[reg] = 0.0f;
    const uint8_t* smem_q = smem_.q[group_];
    const uint8_t* smem_k = smem_.k[k_pos_.slot];
    // Lane l gives row l % 8 of 8x8 matrix l / 8: A wants (rows, k) blocks (0,0) (8,0) (0,8) (8,8),
    // two B blocks of 8 columns (0,0) (0,8) (8,0) (8,8).
    const int row_q = warp_ * 16 + lane_ % 16, chunk_q = lane_ / 16;
    const int row_k = lane_ % 8 + lane_ / 16 * 8, chunk_k = lane_ / 8 % 2;
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
      for (int block = 0; block < kCols / 16; ++block) {
        uint32_t reg_k[4];
        ptx::ldmatrix_x4(panel_k + block * 16 * 128, reg_k);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          float (&acc)[4] = *reinterpret_cast<float (*)[4]>(&acc_s[4 * (2 * block + part)]);
          ptx::mma_m16n8k16_bf16(acc, reg_q, reg_k[2 * part], reg_k[2 * part + 1]);
        }
      }
    }
  }

  // S is in registers: let the loader have Q after the tile's last step, then mask S.
  template <class W>
  __device__ __forceinline__ void finish_qk(W width, int32_t flags, int32_t parts,
                                            float (&acc_s)[kRegsS]) {
    if (flags & Config::kLast) release(&smem_.q_empty[group_]);
    prescale(acc_s);
    if (flags & Config::kPartial) {
      ptx::mbar_wait_warp(&smem_.mask_full[mask_pos_.slot], mask_pos_.parity);
      const int row = group_ * Config::kRowsPerGroup + warp_ * 16 + lane_ / 4;
      const auto& bits = smem_.mask_bits[mask_pos_.slot];
      // A half of 80 columns begins in the middle of a word.
      constexpr int kHalfBits = kCols / 2 % 32;
      const int first_word = parts == 2 ? kCols / 2 / 32 : 0;
#pragma unroll
      for (int word = 0; word < (width.cols() + 31) / 32; ++word) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t* row_bits = &bits[row + 8 * half][first_word + word];
          uint32_t columns = row_bits[0];
          if constexpr (kHalfBits != 0 && width.cols() < kCols) {
            if (parts == 2) columns = __funnelshift_r(columns, row_bits[1], kHalfBits);
          }
          // Bits 8 j + e of this are columns 32 word + 8 j + 2 (lane % 4) + e: the thread's own.
          const uint32_t own = columns >> (2 * (lane_ % 4));
#pragma unroll
          for (int block = 0; block < 4; ++block) {
            const int reg = 4 * (4 * word + block) + 2 * half;
            if (reg < width.regs_s()) {
              if (!(own & (1u << (8 * block)))) acc_s[reg] = -INFINITY;
              if (!(own & (2u << (8 * block)))) acc_s[reg + 1] = -INFINITY;
            }
          }
        }
      }
      release(&smem_.mask_empty[mask_pos_.slot]);
      mask_pos_.next();
    }
  }

  template <class W>
  __device__ __forceinline__ void pack(W width, const float (&acc_s)[kRegsS],
                                       uint32_t (&reg_p)[kRegsP]) {
#pragma unroll
    for (int idx = 0; idx < width.regs_p(); ++idx) {
      reg_p[idx] = ptx::pack2<T>(acc_s[2 * idx], acc_s[2 * idx + 1]);
    }
  }

  // Straight from registers: neighbouring lanes swap halves so that each stores 8 bytes and four
  // lanes fill one 32-byte sector. No shared memory, so nothing of the next tile waits for it.
  __device__ __forceinline__ void write_tile(const Step& step, const RowSoftmax& softmax,
                                             const float (&acc_o)[kRegsO]) {
    const int32_t row = step.q_begin + group_ * Config::kRowsPerGroup + warp_ * 16 + lane_ / 4;
    const bool is_odd = lane_ & 1;
    const int32_t col = (is_odd ? 8 : 0) + (lane_ & 2) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.row_sum(half);
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      const int32_t q_idx = row + 8 * half;
      const bool is_row = q_idx < args_.s_q;
      T* out = static_cast<T*>(args_.out) + step.b_idx * args_.stride_out.b +
               q_idx * args_.stride_out.s + step.h_idx * args_.stride_out.h;  // [d_v]
#pragma unroll
      for (int block = 0; block < Config::kHeadV / 8; block += 2) {
        // A row without a visible key is 0 even if O holds 0 * NaN.
        auto packed = [&](int at) {
          const int reg = 4 * at + 2 * half;
          return sum == 0.0f ? 0u : ptx::pack2<T>(acc_o[reg] * inverse, acc_o[reg + 1] * inverse);
        };
        const uint32_t first = packed(block), second = packed(block + 1);
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, is_odd ? first : second, 1);
        const uint2 value = is_odd ? make_uint2(other, second) : make_uint2(first, other);
        if (is_row && 8 * block + col < args_.d_v) {
          *reinterpret_cast<uint2*>(out + 8 * block + col) = value;
        }
      }
      if (is_row && lane_ % 4 == 0) {
        args_.lse[(int64_t{step.b_idx} * args_.h_q + step.h_idx) * args_.s_q + q_idx] =
            softmax.lse(half, sum, args_.scale);
      }
    }
  }

  const FwdArgs& args_;
  Smem& smem_;
  int group_, warp_, lane_;
  RingPos<Config::kStages> k_pos_, v_pos_;
  RingPos<Config::kMaskSlots> mask_pos_;
  uint32_t q_parity_ = 0;
  int32_t num_passed_v_ = 0, max_passed_ = 0;
  bool is_new_tile_ = false;
};

}  // namespace fm3::sm90
