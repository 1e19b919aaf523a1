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
  FM3_HOST_DEVICE SpanWriter(Span* spans, bool is_writer, int32_t item_cols)
      : spans_(spans), is_writer_(is_writer), granules_per_item_(item_cols / kGranuleCols) {}

  FM3_HOST_DEVICE bool wants_only_full_end() const { return run_begin_ >= 0; }
  FM3_HOST_DEVICE bool is_idle_at(int32_t granule) const {
    return run_begin_ < 0 && granule >= next_free_;
  }

  FM3_HOST_DEVICE void granule(int32_t idx, bool is_visible, bool is_full) {
    if (idx < next_free_) return;
    if (run_begin_ >= 0) {
      if (is_full) return;
      close_run(idx);
      if (idx < next_free_) return;
    }
    if (!is_visible) return;
    if (is_full) {
      run_begin_ = idx;
    } else {
      emit(idx, 1, false);
    }
  }

  FM3_HOST_DEVICE void finish(int32_t num_granules) {
    if (run_begin_ >= 0) close_run(num_granules);
    if (num_items_ == 0) emit(0, 1, false);
    flush();
    if (is_writer_) spans_[num_spans_] = Span::make(0, 0, false);  // the end, for those who read on
  }
  FM3_HOST_DEVICE int32_t num_items() const { return num_items_; }
  FM3_HOST_DEVICE int32_t num_spans() const { return num_spans_; }

 private:
  FM3_HOST_DEVICE void close_run(int32_t end) {
    const int32_t num_full = (end - run_begin_) / granules_per_item_;
    if (num_full > 0) emit(run_begin_, num_full, true);
    const int32_t rest = run_begin_ + num_full * granules_per_item_;
    run_begin_ = -1;
    if (rest < end) emit(rest, 1, false);
  }
  FM3_HOST_DEVICE void emit(int32_t granule, int32_t count, bool is_full) {
    num_items_ += count;
    next_free_ = granule + count * granules_per_item_;
    if (open_count_ > 0 && open_is_full_ == is_full &&
        open_granule_ + open_count_ * granules_per_item_ == granule &&
        open_count_ + count <= kMaxSpanItems) {
      open_count_ += count;
      return;
    }
    flush();
    while (count > kMaxSpanItems) {
      write(granule, kMaxSpanItems, is_full);
      granule += kMaxSpanItems * granules_per_item_;
      count -= kMaxSpanItems;
    }
    open_granule_ = granule, open_count_ = count, open_is_full_ = is_full;
  }
  FM3_HOST_DEVICE void flush() {
    if (open_count_ > 0) write(open_granule_, open_count_, open_is_full_);
    open_count_ = 0;
  }
  FM3_HOST_DEVICE void write(int32_t granule, int32_t count, bool is_full) {
    if (is_writer_) spans_[num_spans_] = Span::make(granule, count, is_full);
    ++num_spans_;
  }

  Span* spans_;
  bool is_writer_;
  int32_t granules_per_item_;
  int32_t run_begin_ = -1, next_free_ = 0;
  int32_t open_granule_ = 0, open_count_ = 0;
  bool open_is_full_ = false;
  int32_t num_items_ = 0, num_spans_ = 0;
};

}  // namespace fm3::sm90
