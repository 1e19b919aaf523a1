// SPDX-License-Identifier: Apache-2.0
// From the classes of a query tile's granules to its spans. Plain C++, tested on the host.
#pragma once

#include "device_schedule.cuh"

namespace fm3::sm90 {

// Cuts the ascending sequence of granules into items: a run of FULL granules gives FULL items from
// its start; what is left of it, and any PARTIAL granule, begins a partial item that swallows the
// granules after it. The first uncovered visible granule always begins an item, so no cover by
// items of this length is shorter.
class SpanWriter {
 public:
  FM3_HOST_DEVICE SpanWriter(Span* spans, bool is_writer) : spans_(spans), is_writer_(is_writer) {}

  FM3_HOST_DEVICE bool wants_only_full_end() const { return run_begin_ >= 0; }
  FM3_HOST_DEVICE bool is_idle_at(int32_t granule) const {
    return run_begin_ < 0 && granule >= next_free_;
  }

  // `upper`, `lower`: seen by a row of the first, second 64 rows of the tile.
  FM3_HOST_DEVICE void granule(int32_t idx, bool upper, bool lower, bool is_full) {
    if (idx >= next_free_) {
      if (run_begin_ >= 0 && !is_full) close_run(idx);
      if (idx >= next_free_ && run_begin_ < 0) {
        if (is_full) {
          run_begin_ = idx;
        } else if (upper || lower) {
          begin_partial(idx);
        }
      }
    }
    if (idx < next_free_) see(idx, upper, lower);
  }

  FM3_HOST_DEVICE void finish(int32_t num_granules) {
    if (run_begin_ >= 0) close_run(num_granules);
    if (num_items_ == 0) begin_partial(0);
    close_partial();
    flush();
    // A row half that sees nothing computes the first item, whose bits hide everything from it.
    const uint32_t missing = (has_upper_ ? 0u : 1u) | (has_lower_ ? 0u : 4u);
    if (is_writer_) spans_[0].packed |= missing << (kSpanCountBits + 1);
  }
  FM3_HOST_DEVICE int32_t num_items() const { return num_items_; }
  FM3_HOST_DEVICE int32_t num_spans() const { return num_spans_; }

 private:
  static constexpr int32_t kGranulesPerItem = kItemCols / kGranuleCols;

  FM3_HOST_DEVICE void close_run(int32_t end) {
    const int32_t num_full = (end - run_begin_) / kGranulesPerItem;
    const int32_t rest = run_begin_ + num_full * kGranulesPerItem;
    if (num_full > 0) {
      close_partial();
      push(run_begin_, num_full, true, kAllParts);
      num_items_ += num_full;
      has_upper_ = has_lower_ = true;
    }
    run_begin_ = -1;
    if (rest < end) {
      begin_partial(rest);
      for (int32_t idx = rest; idx < end; ++idx) see(idx, true, true);
    }
  }
  FM3_HOST_DEVICE void begin_partial(int32_t granule) {
    close_partial();
    ++num_items_;
    partial_begin_ = granule, partial_parts_ = 0, has_partial_ = true;
    next_free_ = granule + kGranulesPerItem;
  }
  FM3_HOST_DEVICE void see(int32_t idx, bool upper, bool lower) {
    const int32_t half = 2 * (idx - partial_begin_) >= kGranulesPerItem ? 1 : 0;
    partial_parts_ |= (upper ? 1 << half : 0) | (lower ? 4 << half : 0);
  }
  FM3_HOST_DEVICE void close_partial() {
    if (!has_partial_) return;
    has_partial_ = false;
    has_upper_ |= (partial_parts_ & 3) != 0;
    has_lower_ |= (partial_parts_ & 12) != 0;
    push(partial_begin_, 1, false, partial_parts_);
  }
  FM3_HOST_DEVICE void push(int32_t granule, int32_t count, bool is_full, int32_t parts) {
    if (open_count_ > 0 && open_is_full_ == is_full && open_parts_ == parts &&
        open_granule_ + open_count_ * kGranulesPerItem == granule &&
        open_count_ + count <= kMaxSpanItems) {
      open_count_ += count;
      return;
    }
    flush();
    for (; count > kMaxSpanItems; count -= kMaxSpanItems) {
      write(granule, kMaxSpanItems, is_full, parts);
      granule += kMaxSpanItems * kGranulesPerItem;
    }
    open_granule_ = granule, open_count_ = count, open_is_full_ = is_full, open_parts_ = parts;
  }
  FM3_HOST_DEVICE void flush() {
    if (open_count_ > 0) write(open_granule_, open_count_, open_is_full_, open_parts_);
    open_count_ = 0;
  }
  FM3_HOST_DEVICE void write(int32_t granule, int32_t count, bool is_full, int32_t parts) {
    if (is_writer_) spans_[num_spans_] = Span::make(granule, count, is_full, parts);
    ++num_spans_;
  }

  Span* spans_;
  bool is_writer_;
  int32_t run_begin_ = -1, next_free_ = 0;
  int32_t partial_begin_ = 0, partial_parts_ = 0;
  bool has_partial_ = false, has_upper_ = false, has_lower_ = false;
  int32_t open_granule_ = 0, open_count_ = 0, open_parts_ = 0;
  bool open_is_full_ = false;
  int32_t num_items_ = 0, num_spans_ = 0;
};

}  // namespace fm3::sm90
