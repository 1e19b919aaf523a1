// SPDX-License-Identifier: Apache-2.0
// From the bits of a query tile's granules to its spans: one warp a list.
//
// Items have a fixed length. The first begins at the first visible granule (or a few ahead, which then count
// as visible: granules_ahead), each next one at the first visible granule after the item before: no cover by
// items of this length is shorter. An item whose granules are all FULL is a full item; spans are runs of
// touching items of one kind.
//
// Where an item begins depends on all items before it, but only through the offset (0 to length - 1)
// at which a stretch of granules is entered. So a stretch is a function of that offset, a table of
// 4 bits an entry. Words of granules that are all hidden, all visible or all FULL join to segments,
// any other word is one by itself; a lane takes a segment, the tables of 32 segments are followed one
// after the other, and then every lane knows its items.
#pragma once

#include "device_schedule.cuh"

namespace fm3::sm90 {

constexpr uint32_t kWholeWarp = 0xFFFFFFFF;
constexpr int32_t kWordGranules = 32;
constexpr int32_t kBlockWords = 32;  // segments end at multiples of this
// A CTA works on so many columns at a time.
constexpr int32_t kSectionBlocks = 8, kSectionWords = kSectionBlocks * kBlockWords;
constexpr int32_t kSectionGranules = kSectionWords * kWordGranules;  // 131,072 columns

struct ItemLength {
  int32_t granules, inverse;
  __device__ __forceinline__ explicit ItemLength(int32_t item_cols)
      : granules(item_cols / kGranuleCols), inverse((1 << 16) / granules + 1) {}
  // x / granules for 0 <= x <= kBlockWords * kWordGranules
  __device__ __forceinline__ int32_t divide(int32_t x) const { return x * inverse >> 16; }
  __device__ __forceinline__ int32_t remainder(int32_t x) const { return x - divide(x) * granules; }
};

// Entry o, of 4 bits: at which offset behind a stretch it goes on when entered at offset o.
struct OffsetTable {
  static constexpr int32_t kBits = 4;
  static constexpr uint64_t kSame = 0xA9876543210, kOnes = 0x11111111111;
  uint64_t entries;

  __device__ __forceinline__ int32_t at(int32_t offset) const {
    return static_cast<int32_t>(entries >> kBits * offset & 15);
  }
  __device__ __forceinline__ static OffsetTable same(ItemLength length) {
    return {kSame & mask(length)};
  }
  // The table of `count` visible or hidden granules and this one's stretch behind them. Before a
  // visible granule, an offset of 0 goes on where length - 1 does behind it; before a hidden one,
  // where 0 does.
  __device__ __forceinline__ void prepend(bool is_visible, int32_t count, ItemLength length) {
    if (is_visible) {
      const int32_t turn = length.remainder(count);
      entries =
          (entries << kBits * turn | entries >> kBits * (length.granules - turn)) & mask(length);
    } else {
      const uint64_t filled = (entries & 15) * kOnes;
      const int32_t shift = kBits * min(count, length.granules);
      entries = (entries << shift | (filled & ((uint64_t{1} << shift) - 1))) & mask(length);
    }
  }
  // Of one word; by runs, or granule by granule, which is faster where runs are many.
  __device__ __forceinline__ static OffsetTable of(uint32_t visible, bool has_many_runs,
                                                   ItemLength length) {
    OffsetTable table = same(length);
    if (has_many_runs) {
      const int32_t shift = kBits * (length.granules - 1);
      for (int32_t granule = kWordGranules - 1; granule >= 0; --granule) {
        const uint64_t first =
            (visible >> granule & 1) != 0 ? table.entries >> shift : table.entries & 15;
        table.entries = (table.entries << kBits | first) & mask(length);
      }
      return table;
    }
    for (int32_t num_left = kWordGranules; num_left > 0;) {
      const bool is_visible = static_cast<int32_t>(visible) < 0;
      const int32_t count = min(__clz(is_visible ? ~visible : visible), num_left);
      table.prepend(is_visible, count, length);
      num_left -= count;
      visible = count < kWordGranules ? visible << count : 0;
    }
    return table;
  }

 private:
  __device__ __forceinline__ static uint64_t mask(ItemLength length) {
    return (uint64_t{1} << kBits * length.granules) - 1;
  }
};

// What the granules of a word have in common.
enum class WordKind : int32_t { kHidden, kVisible, kFull, kMixed };

// A section of one list.
struct ListWords {
  // A bit a granule: it is visible; all granules of an item that begins here are FULL.
  uint32_t visible[kSectionWords], full[kSectionWords];
  uint64_t tables[kSectionWords];    // of mixed words
  uint16_t segments[kSectionWords];  // by block: the words that segments begin at
  int32_t num_segments[kSectionBlocks];

  static constexpr int32_t kManyRuns = 6;

  __device__ __forceinline__ static WordKind kind(uint32_t visible, uint32_t full) {
    if (visible == 0) return WordKind::kHidden;
    if (visible != 0xFFFFFFFF || (full != 0 && full != 0xFFFFFFFF)) return WordKind::kMixed;
    return full == 0 ? WordKind::kVisible : WordKind::kFull;
  }

  // All granules of a block hidden (bits 0), or all FULL and those after it, too; for one lane.
  __device__ __forceinline__ void set_alike(int32_t block, uint32_t bits) {
    const int32_t word = block * kBlockWords;
    visible[word] = full[word] = bits;
    segments[word] = static_cast<uint16_t>(word), num_segments[block] = 1;
  }

  // By a whole warp, the lanes with neighbouring words of one block. full, full_after: bits of FULL
  // granules of the word and of the next one. An item of a shifted list reaches into one more granule.
  __device__ __forceinline__ void set(int32_t word, uint32_t word_visible, uint32_t word_full,
                                      uint32_t full_after, ItemLength length, bool is_shifted) {
    const int32_t lane = threadIdx.x % 32;
    uint64_t run = uint64_t{full_after} << 32 | word_full;
    run &= run >> 1, run &= run >> 2, run &= run >> 4;
    const int32_t item_granules = length.granules + (is_shifted ? 1 : 0);
    const auto item_full = static_cast<uint32_t>(run & run >> (item_granules - 8));
    visible[word] = word_visible, full[word] = item_full;
    const WordKind own = kind(word_visible, item_full);
    const auto before =
        static_cast<WordKind>(__shfl_up_sync(kWholeWarp, static_cast<int32_t>(own), 1));
    const bool begins = lane == 0 || own == WordKind::kMixed || own != before;
    const uint32_t beginning = __ballot_sync(kWholeWarp, begins);
    if (begins) {
      segments[word - lane + __popc(beginning & ((1u << lane) - 1))] = static_cast<uint16_t>(word);
    }
    if (lane == 0) num_segments[word / kBlockWords] = __popc(beginning);
    const bool has_many_runs =
        __ballot_sync(kWholeWarp, __popc(word_visible ^ word_visible << 1) > kManyRuns) != 0;
    if (own == WordKind::kMixed) {
      tables[word] = OffsetTable::of(word_visible, has_many_runs, length).entries;
    }
  }
};

class ListWarp {
 public:
  __device__ __forceinline__ ListWarp(Span* spans, int32_t item_cols)
      : spans_(spans), lane_(threadIdx.x % 32), length_(item_cols) {}

  // Sections come in ascending order.
  __device__ __forceinline__ void section(const ListWords& words, int32_t section_idx,
                                          int32_t num_blocks) {
    if (open_ >= 0 &&
        (end_ >> 2) - (open_ >> 1) >
            (kMaxSpanItems - kSectionGranules / length_.granules) * length_.granules) {
      end_ |= 2;  // no item touches this: a new span, so that counts fit
    }
    int32_t num_segments = 0;
    for (int32_t block = 0; block < num_blocks; ++block) num_segments += words.num_segments[block];
    for (int32_t base = 0; base < num_segments; base += 32) {
      batch(words, section_idx * kSectionGranules, base, num_segments);
    }
  }

  // ends_early: the last visible granule shows nothing from column `shift` on: all that it shows
  // belongs to the granule before it. has_short: a short last item costs half of one.
  __device__ __forceinline__ TileCost finish(int32_t shift, bool ends_early, bool has_short) {
    if (num_items_ == 0) {  // sees nothing: one item, all of it hidden
      open_ = 0, end_ = length_.granules << 2, num_items_ = num_spans_ = 1;
    }
    // Granules at the last item's end that it need not show.
    const int32_t num_hidden = (end_ >> 2) - 1 - last_visible_ + (ends_early ? 1 : 0);
    const bool ends_short =
        num_items_ > 1 && length_.granules - num_hidden <= kShortItemCols / kGranuleCols;
    if (lane_ == 0) {
      write(num_spans_ - 1, open_, end_, ends_short);
      spans_[num_spans_] = Span::make(0, 0, false, false);  // the end, for those who read on
    }
    return {
        2 * num_items_ - (has_short && ends_short ? 1 : 0), ListHead::make(num_spans_, shift), {}};
  }

 private:
  struct Segment {
    int32_t granule, num_granules;
    uint32_t visible, full;
    WordKind kind;
  };

  __device__ __forceinline__ void batch(const ListWords& words, int32_t section_granule,
                                        int32_t base, int32_t num_segments) {
    Segment segment = {0, 0, 0, 0, WordKind::kHidden};
    OffsetTable table = {0};  // of hidden granules: goes on at once
    if (base + lane_ < num_segments) {
      int32_t block = 0, idx = base + lane_;
      while (idx >= words.num_segments[block]) idx -= words.num_segments[block++];
      const int32_t word = words.segments[block * kBlockWords + idx];
      const int32_t word_end = idx + 1 < words.num_segments[block]
                                   ? words.segments[block * kBlockWords + idx + 1]
                                   : (block + 1) * kBlockWords;
      segment.visible = words.visible[word], segment.full = words.full[word];
      segment.kind = ListWords::kind(segment.visible, segment.full);
      segment.granule = section_granule + word * kWordGranules;
      segment.num_granules = (word_end - word) * kWordGranules;
      if (segment.kind == WordKind::kMixed) {
        table.entries = words.tables[word];
      } else if (segment.kind != WordKind::kHidden) {
        table = OffsetTable::same(length_);
        table.prepend(true, segment.num_granules, length_);
      }
    }
    const int32_t offset = follow(table, min(num_segments - base, 32));

    int32_t num_items = 0, num_starts = 0, first = -1, open = -1, end = -1;
    walk(segment, offset, [&](int32_t granule, int32_t count, int32_t is_full) {
      if (end != (granule << 2 | is_full)) {
        open = granule << 1 | is_full;
        if (num_starts++ == 0) first = granule << 2 | is_full;
      }
      end = (granule + count * length_.granules) << 2 | is_full;
      num_items += count;
    });
    const uint32_t before = (1u << lane_) - 1;
    const uint32_t with_items = __ballot_sync(kWholeWarp, num_items > 0);
    const int32_t end_before = last_of(end, with_items & before, end_);
    if (num_items > 0 && first == end_before) --num_starts;  // goes on with the span before
    const uint32_t with_starts = __ballot_sync(kWholeWarp, num_starts > 0);
    const int32_t open_before = last_of(open, with_starts & before, open_);
    int32_t starts_before = num_spans_;
    for (int32_t bit = 0; bit < 3; ++bit) {  // a word has at most four items
      const uint32_t ones = __ballot_sync(kWholeWarp, num_starts >> bit & 1);
      starts_before += __popc(ones & before) << bit;
      num_spans_ += __popc(ones) << bit;
    }
    end_ = last_of(end, with_items, end_);
    open_ = last_of(open, with_starts, open_);
    num_items_ += __reduce_add_sync(kWholeWarp, num_items);
    const bool is_visible = segment.kind != WordKind::kHidden;
    const int32_t last_visible =
        segment.granule +
        (segment.kind == WordKind::kMixed ? 31 - __clz(segment.visible) : segment.num_granules - 1);
    last_visible_ = last_of(last_visible, __ballot_sync(kWholeWarp, is_visible), last_visible_);

    int32_t span_idx = starts_before - 1, span_open = open_before, span_end = end_before;
    walk(segment, offset, [&](int32_t granule, int32_t count, int32_t is_full) {
      if (span_end != (granule << 2 | is_full)) {
        if (span_idx >= 0) write(span_idx, span_open, span_end, false);
        ++span_idx;
        span_open = granule << 1 | is_full;
      }
      span_end = (granule + count * length_.granules) << 2 | is_full;
    });
  }

  // The offset at which this lane's segment is entered.
  __device__ __forceinline__ int32_t follow(OffsetTable table, int32_t num_segments) {
    int32_t own = 0;
#pragma unroll 4
    for (int32_t lane = 0; lane < num_segments; ++lane) {
      if (lane == lane_) own = offset_;
      offset_ = OffsetTable{__shfl_sync(kWholeWarp, table.entries, lane)}.at(offset_);
    }
    return own;
  }

  // `value` of the last of `lanes`, or `otherwise`.
  __device__ __forceinline__ int32_t last_of(int32_t value, uint32_t lanes, int32_t otherwise) {
    const int32_t other = __shfl_sync(kWholeWarp, value, 31 - __clz(lanes | 1));
    return lanes == 0 ? otherwise : other;
  }

  // take(granule, count, is_full) for the segment's items, `count` touching ones of a kind at once.
  template <class Take>
  __device__ __forceinline__ void walk(const Segment& segment, int32_t offset, Take take) {
    if (segment.kind == WordKind::kMixed) {
      while (offset < kWordGranules && segment.visible >> offset != 0) {
        offset += __ffs(segment.visible >> offset) - 1;
        take(segment.granule + offset, 1, static_cast<int32_t>(segment.full >> offset & 1));
        offset += length_.granules;
      }
    } else if (segment.kind != WordKind::kHidden) {
      take(segment.granule + offset, length_.divide(segment.num_granules - 1 - offset) + 1,
           segment.kind == WordKind::kFull ? 1 : 0);
    }
  }

  __device__ __forceinline__ void write(int32_t span_idx, int32_t open, int32_t end,
                                        bool ends_short) {
    spans_[span_idx] = Span::make(open >> 1, ((end >> 2) - (open >> 1)) / length_.granules,
                                  (open & 1) != 0, ends_short);
  }

  Span* spans_;
  int32_t lane_;
  ItemLength length_;
  // What is carried on: offset of the next item; the open span, as granule << 1 | is_full; where it
  // ends, as granule << 2 | is_full.
  int32_t offset_ = 0, open_ = -1, end_ = -1;
  int32_t num_items_ = 0, num_spans_ = 0;
  int32_t last_visible_ = 0;  // granule
};

}  // namespace fm3::sm90
