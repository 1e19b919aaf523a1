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
    for (int count = item + 1; count >= 1; --count) {  // downwards: out[count - 1] is still without `item`
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

PairSplit PairSplitter::solve(const Load* items, int num_items, int num_left, Load base_left,
                              Load base_right, double speed_left, double speed_right) {
  Load total = 0;
  for (int i = 0; i < num_items; ++i) total += items[i];
  const int num_low = num_items / 2, num_high = num_items - num_low;
  list_subsets(items, num_low, 0, low_);
  list_subsets(items + num_low, num_high, num_low, high_);
  // Left load at which both finish together; the best subset is next to it on either side.
  const double meet = double(base_left + base_right + total) * speed_left / (speed_left + speed_right) -
                      double(base_left);
  PairSplit best{0, std::numeric_limits<double>::infinity()};
  for (int count_low = std::max(0, num_left - num_high); count_low <= std::min(num_low, num_left);
       ++count_low) {
    const auto& low = low_[count_low];
    const auto& high = high_[num_left - count_low];
    int64_t j = int64_t(high.size()) - 1;  // last `high` that keeps the left load at or below `meet`
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
