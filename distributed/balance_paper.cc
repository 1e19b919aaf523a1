// SPDX-License-Identifier: Apache-2.0
// The paper's IPO: longest first, then pair refinement, then triple refinement, each step only if the global
// maximum falls. Kept beside our own search so that its table can be reproduced and compared.
#include <algorithm>
#include <numeric>

#include "balance.h"

namespace fm3::planner {
namespace {

constexpr int64_t kMaxTripleNodes = 2000000;
constexpr int kMaxPairChunks = 10;   // per rank: beyond this phase 2 is skipped
constexpr int kMaxTripleChunks = 8;  // per rank: beyond this phase 3 is skipped

class Ipo {
 public:
  Ipo(const std::vector<Load>& weights, int32_t num_ranks)
      : weights_(weights), num_ranks_(num_ranks), slots_(int32_t(weights.size()) / num_ranks) {
    const std::vector<int32_t> capacity(num_ranks, slots_);
    const auto ranks = balance_lpt({weights, capacity, std::vector<double>(num_ranks, 1.0)});
    chunks_.resize(num_ranks);
    loads_.resize(num_ranks);
    for (int32_t chunk = 0; chunk < int32_t(weights.size()); ++chunk) {
      chunks_[ranks[chunk]].push_back(chunk);
      loads_[ranks[chunk]] += weights[chunk];
    }
  }

  PaperBalance run(int32_t last_phase) {
    int32_t p3_successes = 0;
    const int max_rounds = slots_ <= 8 ? 200 : slots_ <= 12 ? 50 : 20;
    if (last_phase >= 2 && slots_ <= kMaxPairChunks) {
      for (int round = 0; round < max_rounds; ++round) {
        if (refine_pair()) continue;
        if (last_phase < 3 || num_ranks_ < 3 || slots_ > kMaxTripleChunks || !refine_triple())
          break;
        ++p3_successes;
      }
    }
    PaperBalance result{std::vector<int32_t>(weights_.size()), max_load(), p3_successes};
    for (int32_t rank = 0; rank < num_ranks_; ++rank) {
      for (int32_t chunk : chunks_[rank]) result.ranks[chunk] = rank;
    }
    return result;
  }

 private:
  Load max_load() const { return *std::max_element(loads_.begin(), loads_.end()); }
  int32_t heaviest() const {
    return int32_t(std::max_element(loads_.begin(), loads_.end()) - loads_.begin());
  }

  Load max_except(std::initializer_list<int32_t> ranks) const {
    Load result = 0;
    for (int32_t rank = 0; rank < num_ranks_; ++rank) {
      if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end())
        result = std::max(result, loads_[rank]);
    }
    return result;
  }

  bool refine_pair() {
    const int32_t rank = heaviest();
    const Load before = loads_[rank];
    Load best = before;
    int32_t best_other = -1;
    uint32_t best_mask = 0;
    std::vector<Load> items;
    for (int32_t other = 0; other < num_ranks_; ++other) {
      if (other == rank) continue;
      items.clear();
      for (int32_t chunk : chunks_[rank]) items.push_back(weights_[chunk]);
      for (int32_t chunk : chunks_[other]) items.push_back(weights_[chunk]);
      const PairSplit split = splitter_.solve(items.data(), int(items.size()), slots_, 0, 0, 1, 1);
      const Load global = std::max(Load(split.finish), max_except({rank, other}));
      if (global < best) {
        best = global;
        best_other = other;
        best_mask = split.left_mask;
      }
    }
    if (best_other < 0) return false;
    std::vector<int32_t> pool = chunks_[rank];
    pool.insert(pool.end(), chunks_[best_other].begin(), chunks_[best_other].end());
    std::vector<std::vector<int32_t>> parts(2);
    for (size_t i = 0; i < pool.size(); ++i) parts[best_mask >> i & 1 ? 0 : 1].push_back(pool[i]);
    assign({rank, best_other}, parts);
    return true;
  }

  bool refine_triple() {
    const int32_t rank = heaviest();
    const Load before = loads_[rank];
    std::vector<int32_t> others;
    for (int32_t other = 0; other < num_ranks_; ++other) {
      if (other != rank) others.push_back(other);
    }
    std::stable_sort(others.begin(), others.end(),
                     [&](int32_t x, int32_t y) { return loads_[x] < loads_[y]; });
    for (size_t i = 0; i < others.size(); ++i) {
      for (size_t j = i + 1; j < others.size(); ++j) {
        const int32_t x = others[i], y = others[j];
        if (max_except({rank, x, y}) >= before) continue;  // a bystander is at the maximum
        if (before + loads_[x] + loads_[y] >= 3 * before) continue;  // their mean is not below it
        if (split_triple({rank, x, y}, before - 1)) return true;
      }
    }
    return false;
  }

  bool split_triple(const std::vector<int32_t>& ranks, Load limit) {
    pool_.clear();
    for (int32_t rank : ranks)
      pool_.insert(pool_.end(), chunks_[rank].begin(), chunks_[rank].end());
    std::stable_sort(pool_.begin(), pool_.end(),
                     [&](int32_t x, int32_t y) { return weights_[x] > weights_[y]; });
    parts_.assign(3, {});
    part_loads_.assign(3, 0);
    nodes_left_ = kMaxTripleNodes;
    if (!place(0, limit)) return false;
    assign(ranks, parts_);
    return true;
  }

  bool place(size_t at, Load limit) {
    if (at == pool_.size()) return true;
    if (nodes_left_-- <= 0) return false;
    for (int part = 0; part < 3; ++part) {
      if (int32_t(parts_[part].size()) == slots_ || part_loads_[part] + weights_[pool_[at]] > limit)
        continue;
      bool is_repeat = false;  // two parts in the same state would give mirrored searches
      for (int earlier = 0; earlier < part; ++earlier) {
        is_repeat |= part_loads_[earlier] == part_loads_[part] &&
                     parts_[earlier].size() == parts_[part].size();
      }
      if (is_repeat) continue;
      parts_[part].push_back(pool_[at]);
      part_loads_[part] += weights_[pool_[at]];
      if (place(at + 1, limit)) return true;
      part_loads_[part] -= weights_[pool_[at]];
      parts_[part].pop_back();
    }
    return false;
  }

  void assign(const std::vector<int32_t>& ranks, const std::vector<std::vector<int32_t>>& parts) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      chunks_[ranks[i]] = parts[i];
      loads_[ranks[i]] = 0;
      for (int32_t chunk : parts[i]) loads_[ranks[i]] += weights_[chunk];
    }
  }

  const std::vector<Load>& weights_;
  int32_t num_ranks_, slots_;
  std::vector<std::vector<int32_t>> chunks_;  // [num_ranks][slots]
  std::vector<Load> loads_;                   // [num_ranks]
  PairSplitter splitter_;
  std::vector<int32_t> pool_;
  std::vector<std::vector<int32_t>> parts_;
  std::vector<Load> part_loads_;
  int64_t nodes_left_ = 0;
};

}  // namespace

PaperBalance balance_paper(const std::vector<Load>& weights, int32_t num_ranks,
                           int32_t last_phase) {
  return Ipo(weights, num_ranks).run(last_phase);
}

}  // namespace fm3::planner
