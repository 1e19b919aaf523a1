// SPDX-License-Identifier: Apache-2.0
// What the query tiles of a CTA see of each granule of columns: from the summaries of hulls, of granules
// where hulls leave it open, of single columns where granules do. And where a list begins.
#pragma once

#include "list_warp.cuh"
#include "scan.cuh"

namespace fm3::sm90 {

constexpr int kListThreads = 512, kListWarps = kListThreads / 32;
constexpr int kPairsPerCta = 2, kTilesPerCta = 2 * kPairsPerCta;
constexpr int kListsPerCta = kTilesPerCta + kPairsPerCta;
constexpr int32_t kHullsPerWord = kWordGranules / kGranulesPerHull;
constexpr int32_t kSectionHulls = kSectionWords * kHullsPerWord;
static_assert(kListWarps == kPairsPerCta * kSectionBlocks, "make_words: a warp a pair and block");

// Bits of a hull's granules: byte `tile`, bit `granule`.
constexpr int32_t kTileBits = kGranulesPerHull;
static_assert(kTilesPerCta * kTileBits <= 32);
FM3_HOST_DEVICE uint32_t tile_bits(int32_t tile) { return 0xFFu << tile * kTileBits; }

// Where a list begins.
struct ListBegin {
  int32_t shift;    // ListHead
  int32_t granule;  // the first visible one, if shift > 0 or ahead > 0
  int32_t ahead;    // granules before it that the first item has, too
  bool ends_early;  // ListWarp::finish
};

// Where rows see more from one to the next at both ends of a list (windows), steps there are masked. The last item has room
// behind the last visible granule; where it saves a masked item, some of it goes ahead of the first one, up to `most`.
// `count` visible granules in a row; the first num_left and the last num_right are not FULL.
FM3_HOST_DEVICE int32_t granules_ahead(int32_t count, int32_t num_left, int32_t num_right,
                                       int32_t most) {
  constexpr int32_t kItem = kTileItemCols / kGranuleCols, kShort = kShortItemCols / kGranuleCols;
  const auto items = [](int32_t granules) { return (granules + kItem - 1) / kItem; };
  const int32_t num_items = items(count), room = num_items * kItem - count;
  // A short last item stays short; it is masked in any case.
  const bool is_short = num_items > 1 && room >= kItem - kShort;
  const int32_t end = smaller(is_short ? room - (kItem - kShort) : room, most) + 1;
  int32_t best = 0, least = num_items;  // masked items; one may be so for the sake of both ends
  for (int32_t ahead = 0; ahead < end; ++ahead) {
    const int32_t masked = items(num_left + ahead) + items(num_right + room - ahead);
    if (masked < least) best = ahead, least = masked;
  }
  return best;
}

struct ListSmem {
  // Of a section's hulls and the four after it, which its last items reach into.
  alignas(16) uint32_t visible[kSectionHulls + kHullsPerWord];
  alignas(16) uint32_t full[kSectionHulls + kHullsPerWord];
  alignas(16) uint32_t kept[kSectionHulls + kHullsPerWord];  // by the block mask
  int32_t num_hulls, num_granules;                           // open ones
  ListBegin begins[kListsPerCta];                            // as `lists`
  int32_t q_begins[kTilesPerCta + 1];                        // behind the last tile s_q
  int32_t num_tiles;
  uint16_t hulls[kSectionHulls + kHullsPerWord];
  union {
    uint16_t granules[(kSectionHulls + kHullsPerWord) * kGranulesPerHull];
    ListWords lists[kListsPerCta];  // pair 0, its two tiles, pair 1, its two tiles
  };
};

// Appends `value` of the lanes that are open; for whole warps.
__device__ __forceinline__ void append(uint16_t* values, int32_t* count, bool is_open,
                                       int32_t value) {
  const uint32_t open = __ballot_sync(kWholeWarp, is_open);
  if (open == 0) return;
  const int32_t lane = threadIdx.x % 32;
  int32_t at = 0;
  if (lane == 0) at = atomicAdd(count, __popc(open));
  at = __shfl_sync(kWholeWarp, at, 0) + __popc(open & ((1u << lane) - 1));
  if (is_open) values[at] = static_cast<uint16_t>(value);
}

// The four query tiles of a CTA and what they see of a section of the columns of one list. smem.q_begins and num_tiles are
// there before, if tiles may leave the grid.
// kIsCut: the tiles may leave the grid.
template <BoundForm kForm, bool kIsCut>
class SectionJudge {
  using Summary = BoundSummary<kForm>;

 public:
  __device__ __forceinline__ SectionJudge(const MaskView& mask, const ScheduleView& schedule,
                                          ListSmem& smem, int64_t list_idx, int32_t tile_begin)
      : mask_(mask),
        smem_(smem),
        bounds_(mask.bounds + list_idx * mask.s_k * kNumBounds<kForm>),
        hulls_(static_cast<const Summary*>(schedule.hulls) + list_idx * schedule.num_hulls),
        granules_(static_cast<const Summary*>(schedule.granules) +
                  list_idx * schedule.num_hulls * kGranulesPerHull),
        tile_masks_(mask.block_mask == nullptr
                        ? nullptr
                        : mask.block_mask +
                              (list_idx * schedule.num_q_tiles + tile_begin) * schedule.num_hulls),
        num_hulls_(schedule.num_hulls),
        num_tiles_(kIsCut ? smem.num_tiles : min(schedule.num_q_tiles - tile_begin, kTilesPerCta)),
        q_begin_(tile_begin * kTileQ) {}

  __device__ __forceinline__ void judge_hulls(int32_t hull_begin) {
    const int32_t count = min(num_hulls_ - hull_begin, kSectionHulls + kHullsPerWord);
    const uint32_t all_tiles = 0xFFFFFFFF >> (32 - num_tiles_ * kTileBits);
    Summary summary, next_summary;
    const auto fetch = [&](int32_t idx) {
      if (kForm != BoundForm::kNone && idx < count) next_summary = hulls_[hull_begin + idx];
    };
    fetch(threadIdx.x);
    for (int32_t base = 0; base < count; base += kListThreads) {
      const int32_t idx = base + threadIdx.x, k_begin = (hull_begin + idx) * kHullCols;
      const int32_t k_end = k_begin + kHullCols;
      bool is_open = false;
      summary = next_summary;
      fetch(idx + kListThreads);
      if (idx < count) {
        uint32_t visible = 0, full = 0;
        const Verdict of_all = judge<kForm, true>(summary, mask_, k_begin, k_end, row_begin(0),
                                                  row_end(kTilesPerCta - 1));
        const bool is_hidden = of_all.is_visible_known && !of_all.is_visible;
        if (k_end > mask_.s_k) {
          is_open = !is_hidden;  // columns past s_k are never visible
        } else if (of_all.is_full) {
          visible = full = all_tiles;
        } else if (!is_hidden) {
#pragma unroll
          for (int32_t tile = 0; tile < kTilesPerCta; ++tile) {
            const Verdict verdict =
                judge<kForm, true>(summary, mask_, k_begin, k_end, row_begin(tile), row_end(tile));
            is_open = is_open || !verdict.is_known();
            if (verdict.is_visible) visible |= tile_bits(tile);
            if (verdict.is_full) full |= tile_bits(tile);
          }
        }
        smem_.visible[idx] = visible, smem_.full[idx] = full;
        if (tile_masks_ != nullptr) {
          uint32_t kept = 0;
          for (int32_t tile = 0; tile < num_tiles_; ++tile) {
            if (tile_masks_[tile * num_hulls_ + hull_begin + idx] != 0) kept |= tile_bits(tile);
          }
          smem_.kept[idx] = kept;
        }
      }
      append(smem_.hulls, &smem_.num_hulls, is_open, idx);
    }
    // Up to a whole word, and one more.
    const int32_t idx = count + static_cast<int32_t>(threadIdx.x);
    if (threadIdx.x < 2 * kHullsPerWord && idx < kSectionHulls + kHullsPerWord) {
      smem_.visible[idx] = smem_.full[idx] = smem_.kept[idx] = 0;
    }
  }

  // A warp takes four hulls at a time, a granule a lane; what it takes next is on its way.
  __device__ __forceinline__ void judge_granules(int32_t hull_begin) {
    constexpr int32_t kWarpHulls = 32 / kGranulesPerHull;
    const int32_t lane = threadIdx.x % 32, num_hulls = smem_.num_hulls;
    const int32_t begin = static_cast<int32_t>(threadIdx.x) / 32 * kWarpHulls;
    int32_t idx = 0, next_idx = 0;  // of the hull in the section
    Summary summary, next_summary;
    const auto fetch = [&](int32_t base) {
      const int32_t at = base + lane / kGranulesPerHull;
      if (at >= num_hulls) return;
      next_idx = smem_.hulls[at];
      if (kForm != BoundForm::kNone) {
        next_summary =
            granules_[(hull_begin + next_idx) * kGranulesPerHull + lane % kGranulesPerHull];
      }
    };
    fetch(begin);
    for (int32_t base = begin; base < num_hulls; base += kListWarps * kWarpHulls) {
      const bool is_hull = base + lane / kGranulesPerHull < num_hulls;
      idx = next_idx, summary = next_summary;
      fetch(base + kListWarps * kWarpHulls);
      const int32_t own = idx * kGranulesPerHull + lane % kGranulesPerHull;
      const int32_t granule = hull_begin * kGranulesPerHull + own;
      const int32_t k_begin = granule * kGranuleCols;
      const int32_t k_end = min(k_begin + kGranuleCols, mask_.s_k);
      uint32_t visible = 0, full = 0;  // as in shared memory
      bool is_open = false;
      if (is_hull && k_begin < k_end) {
        const uint32_t bit = 1u << lane % kGranulesPerHull;
#pragma unroll
        for (int32_t tile = 0; tile < kTilesPerCta; ++tile) {
          const Verdict verdict =
              judge<kForm, false>(summary, mask_, k_begin, k_end, row_begin(tile), row_end(tile));
          is_open = is_open || !verdict.is_known();
          if (verdict.is_visible) visible |= bit << tile * kTileBits;
          if (verdict.is_full) full |= bit << tile * kTileBits;
        }
      }
      if (kForm != BoundForm::kNone) append(smem_.granules, &smem_.num_granules, is_open, own);
      if (is_open) visible = full = 0;
      if (k_end - k_begin != kGranuleCols) full = 0;  // columns past s_k are never visible
#pragma unroll
      for (int32_t distance = 1; distance < kGranulesPerHull; distance *= 2) {
        visible |= __shfl_xor_sync(kWholeWarp, visible, distance);
        full |= __shfl_xor_sync(kWholeWarp, full, distance);
      }
      if (is_hull && lane % kGranulesPerHull == 0) {
        smem_.visible[idx] = visible, smem_.full[idx] = full;
      }
    }
  }

  // A warp takes two granules at a time, a column a lane.
  __device__ __forceinline__ void judge_columns(int32_t hull_begin) {
    const int32_t lane = threadIdx.x % 32, half = lane / kGranuleCols;
    const int32_t num_granules = smem_.num_granules;
    for (int32_t base = static_cast<int32_t>(threadIdx.x) / 32 * 2; base < num_granules;
         base += kListWarps * 2) {
      const bool is_granule = base + half < num_granules;
      const int32_t own = is_granule ? smem_.granules[base + half] : 0;
      const int32_t k_begin = (hull_begin * kGranulesPerHull + own) * kGranuleCols;
      const int32_t k_idx = k_begin + lane % kGranuleCols;
      const bool is_column = is_granule && k_idx < mask_.s_k;
      HiddenRows rows{};
      if (is_column) rows = hidden_rows(mask_, bounds_, k_idx);
      uint32_t visible = 0, full = 0;
#pragma unroll 1
      for (int32_t tile = 0; tile < num_tiles_; ++tile) {
        const int32_t begin = row_begin(tile), end = row_end(tile);
        const uint32_t shown = __ballot_sync(kWholeWarp, is_column && !covers(rows, begin, end));
        const uint32_t clear = __ballot_sync(kWholeWarp, is_column && !touches(rows, begin, end));
        constexpr uint32_t kAll = (1u << kGranuleCols) - 1;
        const int32_t bit = tile * kTileBits + own % kGranulesPerHull;
        visible |= ((shown >> half * kGranuleCols & kAll) != 0 ? 1u : 0u) << bit;
        full |= ((clear >> half * kGranuleCols & kAll) == kAll ? 1u : 0u) << bit;
      }
      if (is_granule && lane % kGranuleCols == 0) {
        atomicOr(&smem_.visible[own / kGranulesPerHull], visible);
        atomicOr(&smem_.full[own / kGranulesPerHull], full);
      }
    }
  }

  // A warp a list.
  __device__ __forceinline__ void find_begins(bool of_pairs) {
    const int32_t list = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (list >= kListsPerCta) return;
    const bool is_pair = list % 3 == 0;
    const int32_t tile = list / 3 * 2 + (is_pair ? 0 : list % 3 - 1);
    ListBegin begin = {0, 0, 0, false};
    if (kForm != BoundForm::kNone && tile < num_tiles_ && num_hulls_ <= kSectionHulls &&
        tile_masks_ == nullptr && (!is_pair || of_pairs)) {
      find_begin(tile, is_pair ? tile + 1 : tile, begin);
    }
    if (lane == 0) smem_.begins[list] = begin;
  }

  // Block `warp % kSectionBlocks` of the lists of pair `warp / kSectionBlocks`.
  __device__ __forceinline__ void make_words(int32_t num_words, int32_t pair_cols) {
    const int32_t warp = threadIdx.x / 32;
    const int32_t pair = warp / kSectionBlocks, block = warp % kSectionBlocks;
    const int32_t word = block * kBlockWords + static_cast<int32_t>(threadIdx.x % 32);
    if (block * kBlockWords >= num_words) return;
    const bool is_word = word < num_words;
    const int32_t hull = is_word ? word * kHullsPerWord : 0;
    if (tile_masks_ == nullptr) {
      const uint32_t tiles = (tile_bits(0) | tile_bits(1)) << 2 * pair * kTileBits;
      const auto own = *reinterpret_cast<const uint4*>(smem_.visible + hull);
      const bool is_hidden = !is_word || ((own.x | own.y | own.z | own.w) & tiles) == 0;
      const auto all = [&](const uint32_t* hulls) {
        const auto words = *reinterpret_cast<const uint4*>(hulls);
        return (words.x & words.y & words.z & words.w & tiles) == tiles;
      };
      const bool is_full =
          is_word && all(smem_.full + hull) && all(smem_.full + hull + kHullsPerWord);
      const bool all_hidden = __ballot_sync(kWholeWarp, !is_hidden) == 0;
      if (all_hidden || __ballot_sync(kWholeWarp, !is_full) == 0) {
        if (threadIdx.x % 32 < 3) {
          smem_.lists[3 * pair + threadIdx.x % 32].set_alike(block, all_hidden ? 0 : kWholeWarp);
        }
        return;
      }
    }
    uint32_t visible[2], full[2], full_after[2], kept[2], kept_after[2];
    for (int32_t tile = 0; tile < 2; ++tile) {
      const int32_t byte = 2 * pair + tile;
      visible[tile] = is_word ? gather(smem_.visible + hull, byte) : 0;
      full[tile] = is_word ? gather(smem_.full + hull, byte) : 0;
      full_after[tile] = gather(smem_.full + hull + kHullsPerWord, byte);
      kept[tile] = kept_after[tile] = kWholeWarp;
      if (tile_masks_ != nullptr) {
        kept[tile] = gather(smem_.kept + hull, byte);
        kept_after[tile] = gather(smem_.kept + hull + kHullsPerWord, byte);
      }
    }
    ListWords* const lists = smem_.lists + 3 * pair;
    const ItemLength pair_length(pair_cols), tile_length(kTileItemCols);
    const ListBegin* const begins = smem_.begins + 3 * pair;
    // Of a shifted list the first granule is full from the shift on.
    const auto from_shift = [&](const ListBegin& begin) {
      return begin.shift > 0 && begin.granule / kWordGranules == word
                 ? 1u << begin.granule % kWordGranules
                 : 0;
    };
    // Granules ahead of the first visible one are visited as if they were.
    const auto ahead_of = [&](const ListBegin& begin) {
      const int32_t at = begin.granule - begin.ahead - word * kWordGranules;
      const uint32_t bits = (1u << begin.ahead) - 1;
      if (at <= -kWordGranules || at >= kWordGranules) return 0u;
      return at < 0 ? bits >> -at : bits << at;
    };
    lists[0].set(word, ((visible[0] | visible[1]) & (kept[0] | kept[1])) | ahead_of(begins[0]),
                 (full[0] & full[1] & kept[0] & kept[1]) | from_shift(begins[0]),
                 full_after[0] & full_after[1] & kept_after[0] & kept_after[1], pair_length,
                 begins[0].shift > 0);
#pragma unroll
    for (int32_t tile = 0; tile < 2; ++tile) {
      const ListBegin& begin = begins[1 + tile];
      lists[1 + tile].set(word, (visible[tile] & kept[tile]) | ahead_of(begin),
                          (full[tile] & kept[tile]) | from_shift(begin),
                          full_after[tile] & kept_after[tile], tile_length, begin.shift > 0);
    }
  }

 private:
  __device__ __forceinline__ int32_t row_begin(int32_t tile) const {
    return kIsCut ? smem_.q_begins[tile] : q_begin_ + tile * kTileQ;
  }
  __device__ __forceinline__ int32_t row_end(int32_t tile) const {
    return kIsCut ? smem_.q_begins[tile + 1] : min(row_begin(tile) + kTileQ, mask_.s_q);
  }
  // Of the list of tiles [tile, last_tile], one or two, if it is shifted or begins ahead.
  __device__ __forceinline__ void find_begin(int32_t tile, int32_t last_tile,
                                             ListBegin& begin) const {
    const int32_t lane = threadIdx.x % 32;
    struct Run {
      int32_t first = kNever, last = -1, count = 0;
      __device__ __forceinline__ void add(int32_t word, uint32_t granules) {
        if (granules == 0) return;
        if (first == kNever) first = word * kWordGranules + __ffs(granules) - 1;
        last = word * kWordGranules + 31 - __clz(granules), count += __popc(granules);
      }
      __device__ __forceinline__ void of_warp() {
        first = __reduce_min_sync(kWholeWarp, first), last = __reduce_max_sync(kWholeWarp, last);
        count = __reduce_add_sync(kWholeWarp, count);
      }
    };
    Run seen, full;
    for (int32_t word = lane; word * kHullsPerWord < num_hulls_; word += 32) {
      const uint32_t* const hulls = smem_.visible + word * kHullsPerWord;
      const uint32_t* const full_hulls = smem_.full + word * kHullsPerWord;
      seen.add(word, gather(hulls, tile) | gather(hulls, last_tile));
      full.add(word, gather(full_hulls, tile) & gather(full_hulls, last_tile));
    }
    seen.of_warp(), full.of_warp();
    // Behind a gap an item would begin too late.
    if (seen.count == 0 || seen.count != seen.last - seen.first + 1) return;
    // Half a warp a granule, a column a lane.
    const int32_t k_idx =
        (lane < kGranuleCols ? seen.first : seen.last) * kGranuleCols + lane % kGranuleCols;
    HiddenRows rows{};
    if (k_idx < mask_.s_k) rows = hidden_rows(mask_, bounds_, k_idx);
    const int32_t q_begin = row_begin(tile), q_end = row_end(last_tile);
    const uint32_t shown =
        __ballot_sync(kWholeWarp, k_idx < mask_.s_k && !covers(rows, q_begin, q_end));
    const uint32_t clear =
        __ballot_sync(kWholeWarp, k_idx < mask_.s_k && !touches(rows, q_begin, q_end));
    constexpr uint32_t kAll = (1u << kGranuleCols) - 1;
    const int32_t shift = __ffs(shown) - 1;  // the first granule shows something
    if ((clear & kAll) >> shift == kAll >> shift) {
      begin = {shift, seen.first, 0, shown >> (kGranuleCols + shift) == 0};
    } else if (full.count > 0) {
      // Within the block of words, which may be made alone (set_alike).
      const int32_t ahead =
          granules_ahead(seen.count, full.first - seen.first, seen.last - full.last,
                         seen.first % (kBlockWords * kWordGranules));
      begin = {0, seen.first, ahead, false};
    }
  }

  // Byte `byte` of four neighbours.
  __device__ __forceinline__ static uint32_t gather(const uint32_t* hulls, int32_t byte) {
    const uint4 words = *reinterpret_cast<const uint4*>(hulls);
    const uint32_t select = byte | (byte + 4) << 4;
    return __byte_perm(__byte_perm(words.x, words.y, select), __byte_perm(words.z, words.w, select),
                       0x5410);
  }

  const MaskView& mask_;
  ListSmem& smem_;
  const int32_t* bounds_;
  const Summary *hulls_, *granules_;
  const int32_t* tile_masks_;  // rows of the block mask, or nullptr
  int32_t num_hulls_, num_tiles_, q_begin_;
};

}  // namespace fm3::sm90
