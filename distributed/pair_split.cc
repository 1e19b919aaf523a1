// SPDX-License-Identifier: Apache-2.0
#include "pair_split.h"

#include <algorithm>
#include <limits>

namespace fm3::planner {

void PairSplitter::list_subsets(const Load* items, int num_items, int first_bit, ByCount& out) {
  if (int(out.size()) < num_items + 1) out.resize(num_items + 1);
  for (auto& list : out) list.clear();
  out[0].push_back({0, 0});
  for (int item = 0; item < num_items; ++item) {
    const uint32_t bit = 1u << (first_bit + item);
    for (int count = item + 1; count >= 1;
         --count) {  // downwards: out[count - 1] is still without `item`
      const auto& with = out[count - 1];
      const auto& without = out[count];
      merged_.clear();
      merged_.reserve(with.size() + without.size());
      size_t i = 0;
      for (const Subset& subset : with) {
        const Load sum = subset.sum + items[item];
        while (i < without.size() && without[i].sum <= sum) merged_.push_back(without[i++]);
        merged_.push_back({sum, subset.mask | bit});
      }
      merged_.insert(merged_.end(), without.begin() + i, without.end());
      out[count].swap(merged_);
    }
  }
}

// All subsets one by one: faster than lists while they are few.
PairSplit PairSplitter::solve_directly(const Load* items, int num_items, int num_left,
                                       Load base_left, Load base_right, double speed_left,
                                       double speed_right) {
  constexpr int kHalf = kMaxDirectItems / 2;
  Load low[1 << kHalf], high[1 << (kMaxDirectItems - kHalf)];  // load of every subset of each half
  const int num_low = std::min(num_items, kHalf), num_high = num_items - num_low;
  low[0] = high[0] = 0;
  for (uint32_t mask = 1; mask < (1u << num_low); ++mask)
    low[mask] = low[mask & (mask - 1)] + items[__builtin_ctz(mask)];
  Load total = low[(1u << num_low) - 1];
  for (uint32_t mask = 1; mask < (1u << num_high); ++mask) {
    high[mask] = high[mask & (mask - 1)] + items[num_low + __builtin_ctz(mask)];
  }
  total += high[(1u << num_high) - 1];
  auto& masks = subsets_[num_items][num_left];
  if (masks.empty()) {
    for (uint32_t mask = 0; mask < (1u << num_items); ++mask) {
      if (__builtin_popcount(mask) == num_left) masks.push_back(uint16_t(mask));
    }
  }
  const uint32_t low_bits = (1u << num_low) - 1;
  if (speed_left == speed_right) {
    Load best_load = std::numeric_limits<Load>::max();
    uint32_t best_mask = 0;
    for (const uint32_t mask : masks) {
      const Load left = base_left + low[mask & low_bits] + high[mask >> num_low];
      const Load load = std::max(left, base_left + base_right + total - left);
      if (load < best_load) {
        best_load = load;
        best_mask = mask;
      }
    }
    return {best_mask, double(best_load) / speed_left};
  }
  PairSplit best{0, std::numeric_limits<double>::infinity()};
  for (const uint32_t mask : masks) {
    const Load left = base_left + low[mask & low_bits] + high[mask >> num_low];
    const double finish = std::max(double(left) / speed_left,
                                   double(base_left + base_right + total - left) / speed_right);
    if (finish < best.finish) best = {mask, finish};
  }
  return best;
}

PairSplit PairSplitter::solve(const Load* items, int num_items, int num_left, Load base_left,
                              Load base_right, double speed_left, double speed_right) {
  if (num_items <= kMaxDirectItems) {
    return solve_directly(items, num_items, num_left, base_left, base_right, speed_left,
                          speed_right);
  }
  Load total = 0;
  for (int i = 0; i < num_items; ++i) total += items[i];
  const int num_low = num_items / 2, num_high = num_items - num_low;
  list_subsets(items, num_low, 0, low_);
  list_subsets(items + num_low, num_high, num_low, high_);
  // Left load at which both finish together; the best subset is next to it on either side.
  const double meet =
      double(base_left + base_right + total) * speed_left / (speed_left + speed_right) -
      double(base_left);
  PairSplit best{0, std::numeric_limits<double>::infinity()};
  for (int count_low = std::max(0, num_left - num_high); count_low <= std::min(num_low, num_left);
       ++count_low) {
    const auto& low = low_[count_low];
    const auto& high = high_[num_left - count_low];
    int64_t j =
        int64_t(high.size()) - 1;  // last `high` that keeps the left load at or below `meet`
    for (const Subset& part : low) {
      while (j >= 0 && double(part.sum + high[j].sum) > meet) --j;
      for (int64_t at = std::max<int64_t>(j, 0); at <= j + 1 && at < int64_t(high.size()); ++at) {
        const Load left = part.sum + high[at].sum;
        const double finish = std::max(double(base_left + left) / speed_left,
                                       double(base_right + total - left) / speed_right);
        if (finish < best.finish) best = {part.mask | high[at].mask, finish};
      }
    }
  }
  return best;
}

}  // namespace fm3::planner
