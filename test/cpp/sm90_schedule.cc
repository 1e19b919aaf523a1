// SPDX-License-Identifier: Apache-2.0
// The kernels that prepare a schedule and that change its order, run on the host, and the same lists made
// one granule after the other: for test/unit/test_sm90_spans.py and test_sm90_local_first.py.
#include <algorithm>
#include <array>
#include <vector>

#include "cuda_on_host.h"
#include "ops/cuda/rows/local_first.cuh"
#include "ops/cuda/schedule/launch_sizes.cuh"
#include "ops/cuda/schedule/with_form.cuh"

using namespace fm3;
using namespace fm3::sm90;

namespace {

template <BoundForm kForm>
void build(const MaskView& mask, const ScheduleView& schedule) {
  const LaunchSizes sizes = launch_sizes(mask, schedule);
  cuda_on_host::launch(sizes.scan_ctas, kScanThreads, scan_kernel<kForm>, mask, schedule,
                       sizes.num_blocks);
  if (sizes.cut_ctas > 0) {
    cuda_on_host::launch(sizes.cut_ctas, kCutThreads, cut_kernel<kForm>, mask, schedule);
    cuda_on_host::launch(sizes.list_ctas, kListThreads, list_kernel<kForm, true>, mask, schedule);
  } else {
    cuda_on_host::launch(sizes.list_ctas, kListThreads, list_kernel<kForm, false>, mask, schedule);
  }
  cuda_on_host::launch(sizes.order_ctas, kRankThreads, order_kernel, schedule,
                       sizes.tile_order_ctas, sizes.pair_order_ctas);
}

// Classes of the columns and granules of `num_tiles` query tiles, from single columns. Tile idx has rows
// [begins[idx], begins[idx + 1]).
struct Granules {
  std::vector<bool> is_visible, is_full, shows, is_clear;  // of granules, of columns
};
Granules granules_of(const MaskView& mask, int32_t list_idx, const int32_t* begins,
                     int32_t num_tiles) {
  const int32_t* bounds = mask.bounds + int64_t{list_idx} * mask.s_k * num_bounds(mask.form);
  const int32_t num_hulls = (mask.s_k + kHullCols - 1) / kHullCols;
  const int32_t num_q_tiles = (mask.s_q + kTileQ - 1) / kTileQ;
  const int32_t q_begin = begins[0], q_end = begins[num_tiles];
  const int32_t count = num_hulls * (kHullCols / kGranuleCols);
  Granules granules = {std::vector<bool>(count, false), std::vector<bool>(count, true),
                       std::vector<bool>(count * kGranuleCols, false),
                       std::vector<bool>(count * kGranuleCols, false)};
  for (int32_t k_idx = 0; k_idx < count * kGranuleCols; ++k_idx) {
    int32_t num_kept = 0;
    for (int32_t tile = 0; tile < num_tiles; ++tile) {
      if (k_idx < mask.s_k && begins[tile] < mask.s_q &&
          (mask.block_mask == nullptr ||
           mask.block_mask[(int64_t{list_idx} * num_q_tiles + begins[tile] / kTileQ) * num_hulls +
                           k_idx / kHullCols] != 0)) {
        ++num_kept;
      }
    }
    const HiddenRows rows = num_kept == 0 ? HiddenRows{} : hidden_rows(mask, bounds, k_idx);
    const int32_t idx = k_idx / kGranuleCols;
    granules.shows[k_idx] = num_kept > 0 && !covers(rows, q_begin, q_end);
    granules.is_clear[k_idx] = num_kept == num_tiles && !touches(rows, q_begin, q_end);
    if (granules.shows[k_idx]) granules.is_visible[idx] = true;
    if (!granules.is_clear[k_idx]) granules.is_full[idx] = false;
  }
  return granules;
}

// The shift of a list that may have one.
int32_t shift_of(const MaskView& mask, const Granules& granules) {
  if (mask.block_mask != nullptr || mask.s_k > kSectionGranules * kGranuleCols) return 0;
  const auto& visible = granules.is_visible;
  const auto first = std::find(visible.begin(), visible.end(), true);
  const auto gap = std::find(first, visible.end(), false);
  if (first == visible.end() || std::find(gap, visible.end(), true) != visible.end()) return 0;
  const auto begin = static_cast<int32_t>(first - visible.begin()) * kGranuleCols;
  int32_t shift = 0;
  while (!granules.shows[begin + shift]) ++shift;
  for (int32_t col = shift; col < kGranuleCols; ++col) {
    if (!granules.is_clear[begin + col]) return 0;
  }
  return shift;
}

// Of a list that is not shifted, by how many granules it begins ahead of its first visible one: of the choices that cost no half
// of an item more, the first with the fewest masked halves; one is masked that reaches past the FULL granules on either side.
int32_t granules_ahead_of(const MaskView& mask, const Granules& granules) {
  if (mask.form == BoundForm::kNone || mask.block_mask != nullptr ||
      mask.s_k > kSectionGranules * kGranuleCols) {
    return 0;
  }
  constexpr int32_t kItem = kTileItemCols / kGranuleCols;
  const auto ends_of =
      [](const std::vector<bool>& bits) {  // of the set ones; [0, 0) if there are none
        std::vector<int32_t> set;
        for (size_t idx = 0; idx < bits.size(); ++idx) {
          if (bits[idx]) set.push_back(static_cast<int32_t>(idx));
        }
        return set.empty()
                   ? std::array<int32_t, 3>{}
                   : std::array{set.front(), set.back() + 1, static_cast<int32_t>(set.size())};
      };
  const auto [begin, end, num_visible] = ends_of(granules.is_visible);
  const auto [full_begin, full_end, num_full] = ends_of(granules.is_full);
  if (num_full == 0 || num_visible != end - begin) return 0;
  struct Cost {
    int32_t halves, masked;
  };
  const auto cost = [&, full_begin = full_begin, full_end = full_end, end = end](int32_t first) {
    Cost sum = {0, 0};
    for (int32_t at = first; at < end; at += kItem) {
      const bool is_short = at > first && (end - at) * kGranuleCols <= kShortItemCols;
      sum.halves += is_short ? 1 : 2;
      if (at < full_begin || at + kItem > full_end) sum.masked += is_short ? 1 : 2;
    }
    return sum;
  };
  int32_t best = begin;
  for (int32_t first = begin; first >= begin / 1024 * 1024; --first) {
    if (cost(first).halves == cost(begin).halves && cost(first).masked < cost(best).masked)
      best = first;
  }
  return begin - best;
}

}  // namespace

extern "C" {

// has_cuts: some list of the mask has tiles that begin at documents.
int32_t item_cols(int32_t is_pair, int32_t has_cuts) {
  return is_pair && !has_cuts ? kPairItemCols : kTileItemCols;
}

bool pair_is_walked(int32_t pair, int32_t first, int32_t second) {
  return is_worth_a_pair(pair, first, second);
}

bool pairs_are_walked(uint64_t tile_halves, uint64_t pair_halves, int32_t has_cuts) {
  ScheduleTotals totals = {};
  totals.tile_halves = tile_halves, totals.pair_halves = pair_halves;
  return has_cuts ? are_pairs_worth_it(totals) : are_all_pairs_worth_it(totals);
}

int64_t schedule_bytes(const MaskView* mask) { return schedule_layout(*mask, nullptr, nullptr); }

void build_schedule(const MaskView* mask, void* blob) {
  ScheduleView schedule;
  schedule_layout(*mask, blob, &schedule);
  with_form(mask->form, [&](auto form) { build<decltype(form)::value>(*mask, schedule); });
}

void order_local_first(const MaskView* mask, void* blob, const LocalFirst* first) {
  ScheduleView schedule;
  schedule_layout(*mask, blob, &schedule);
  cuda_on_host::launch(2 * mask->b * mask->h_mask, kOrderLanes, local_first_kernel, schedule,
                       *first);
}

// Query tiles of a list that there is room for.
int32_t room_of_tiles(const MaskView* mask) {
  ScheduleView view;
  schedule_layout(*mask, nullptr, &view);
  return view.tiles.count;
}

// Byte offsets of the totals, of order, costs and spans of tiles, then of pairs; max_spans; and the offsets of q_begins and
// of rest, or -1 if tiles are on the grid.
void schedule_offsets(const MaskView* mask, int64_t* offsets) {
  ScheduleView view;
  char base[1];
  schedule_layout(*mask, base, &view);
  const auto put = [&](const void* part) { *offsets++ = static_cast<const char*>(part) - base; };
  put(view.totals);
  for (const SpanLists& lists : {view.tiles, view.pairs}) {
    put(lists.order), put(lists.costs), put(lists.spans);
  }
  *offsets++ = view.max_spans;
  const bool may_cut = view.q_begins != nullptr;
  *offsets++ = may_cut ? reinterpret_cast<char*>(view.q_begins) - base : -1;
  *offsets = may_cut ? reinterpret_cast<char*>(view.rest) - base : -1;
}

// Spans of one query tile, or of a pair, as `packed` holds them; the head of their list. The tiles begin at begins[0] and
// begins[1], and end at the next one.
uint32_t plain_spans(const MaskView* mask, int32_t list_idx, const int32_t* begins, int32_t is_pair,
                     int32_t has_cuts, uint32_t* packed, int32_t capacity) {
  const Granules granules = granules_of(*mask, list_idx, begins, is_pair ? 2 : 1);
  const auto num_granules = static_cast<int32_t>(granules.is_visible.size());
  const int32_t length = item_cols(is_pair, has_cuts) / kGranuleCols;
  const bool may_move = !is_pair || has_cuts;
  const int32_t shift = may_move ? shift_of(*mask, granules) : 0;
  const int32_t ahead = may_move && shift == 0 ? granules_ahead_of(*mask, granules) : 0;
  const auto first_visible =
      static_cast<int32_t>(std::find(granules.is_visible.begin(), granules.is_visible.end(), true) -
                           granules.is_visible.begin());
  struct Open {
    int32_t begin, count, is_full;
  };
  std::vector<Open> spans;
  int32_t last = 0;           // where the last item begins
  bool is_first = shift > 0;  // then its first granule counts from the shift on
  for (int32_t at = 0; at < num_granules;) {
    if (!granules.is_visible[at] && at != first_visible - ahead) {
      ++at;
      continue;
    }
    bool is_full = true;
    for (int32_t idx = is_first ? at + 1 : at; idx < at + length + (shift > 0 ? 1 : 0); ++idx) {
      is_full = is_full && idx < num_granules && granules.is_full[idx];
    }
    const bool is_long =  // then the next section's first item begins a new span
        !spans.empty() && last / kSectionGranules != at / kSectionGranules &&
        spans.back().count > kMaxSpanItems - kSectionGranules / length;
    if (!spans.empty() && !is_long && spans.back().is_full == is_full &&
        spans.back().begin + spans.back().count * length == at) {
      ++spans.back().count;
    } else {
      spans.push_back({at, 1, is_full});
    }
    last = at, at += length, is_first = false;
  }
  if (spans.empty()) spans.push_back({0, 1, false});
  bool ends_short = spans.size() > 1 || spans.back().count > 1;
  const int32_t last_begin = last * kGranuleCols + shift;
  for (int32_t col = last_begin + kShortItemCols; col < num_granules * kGranuleCols; ++col) {
    if (granules.shows[col]) ends_short = false;
  }
  for (int32_t idx = 0; idx < std::min<int32_t>(spans.size(), capacity); ++idx) {
    const bool is_last = idx + 1 == static_cast<int32_t>(spans.size());
    packed[idx] = Span::make(spans[idx].begin, spans[idx].count, spans[idx].is_full != 0,
                             is_last && ends_short)
                      .packed;
  }
  return ListHead::make(static_cast<int32_t>(spans.size()), shift).packed;
}

}  // extern "C"
