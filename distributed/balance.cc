// SPDX-License-Identifier: Apache-2.0
#include "balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace fm3::planner {
namespace {

// Chunks by weight, heaviest first; ties by index, so that every rank computes the same plan.
std::vector<int32_t> heaviest_first(const std::vector<Load>& weights) {
  std::vector<int32_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t x, int32_t y) {
    return weights[x] != weights[y] ? weights[x] > weights[y] : x < y;
  });
  return order;
}

class Random {  // splitmix64: the same sequence on every machine
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint32_t below(uint32_t n) {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return uint32_t(((z ^ (z >> 31)) >> 32) * n >> 32);
  }

 private:
  uint64_t state_;
};

// Every rank is filled to its capacity with items; empty slots hold phantom items of weight 0, so that
// "at most capacity chunks" becomes "exactly capacity items".
class Descent {
 public:
  Descent(const BalanceProblem& problem, const BalanceOptions& options)
      : problem_(problem),
        options_(options),
        bound_(lower_bound(problem)),
        triples_left_(options.max_triples) {
    goal_ = bound_ * (1 + options.target_gap);
  }

  Balance run() {
    load_assignment(balance_lpt(problem_));
    descend();
    std::vector<std::vector<int32_t>> best = items_;
    double best_finish = finish_of(heaviest());
    Random random(problem_.weights.size() * 1000003u + problem_.capacity.size());
    for (int32_t kick = 0; kick < options_.max_kicks && best_finish > goal_; ++kick) {
      disturb(random);
      triples_left_ = std::max<int64_t>(triples_left_, options_.max_triples / 8);
      descend();
      const double finish = finish_of(heaviest());
      if (finish < best_finish) {
        best_finish = finish;
        best = items_;
      } else if (kick % 8 == 7) {
        load_items(best);
      }
    }
    Balance result{std::vector<int32_t>(problem_.num_chunks()), best_finish, bound_};
    for (int32_t rank = 0; rank < problem_.num_ranks(); ++rank) {
      for (int32_t item : best[rank]) {
        if (item < problem_.num_chunks()) result.ranks[item] = rank;
      }
    }
    return result;
  }

 private:
  Load weight(int32_t item) const {
    return item < problem_.num_chunks() ? problem_.weights[item] : 0;
  }
  double finish_of(int32_t rank) const { return double(loads_[rank]) / problem_.speed[rank]; }

  int32_t heaviest() const {
    int32_t latest = 0;
    for (int32_t rank = 1; rank < problem_.num_ranks(); ++rank) {
      if (finish_of(rank) > finish_of(latest)) latest = rank;
    }
    return latest;
  }

  void load_items(const std::vector<std::vector<int32_t>>& items) {
    items_ = items;
    loads_.assign(problem_.num_ranks(), 0);
    for (int32_t rank = 0; rank < problem_.num_ranks(); ++rank) {
      for (int32_t item : items_[rank]) loads_[rank] += weight(item);
    }
  }

  void load_assignment(const std::vector<int32_t>& ranks) {
    std::vector<std::vector<int32_t>> items(problem_.num_ranks());
    for (int32_t chunk = 0; chunk < problem_.num_chunks(); ++chunk)
      items[ranks[chunk]].push_back(chunk);
    int32_t phantom = problem_.num_chunks();
    for (int32_t rank = 0; rank < problem_.num_ranks(); ++rank) {
      while (int32_t(items[rank].size()) < problem_.capacity[rank])
        items[rank].push_back(phantom++);
    }
    load_items(items);
  }

  // Claim:      descend() ends.
  // Because:    each step replaces the finishes of two or three ranks, of which one was the maximum, by
  //             finishes all below it; so (maximum, number of ranks at it) falls lexicographically, and
  //             there are finitely many assignments. Ties at the maximum cannot stop it, unlike a rule that
  //             asks the global maximum to fall (the paper's phase 2).
  // Breaks if:  a step is taken with finish >= the old maximum.
  // Tested by:  test/unit/test_balance.py::test_random_problems_against_exact
  void descend() {
    while (true) {
      const int32_t rank = heaviest();
      if (finish_of(rank) <= goal_) return;
      if (!improve_by_pair(rank) && !improve_by_triple(rank)) return;
    }
  }

  std::vector<int32_t> others_by_finish(int32_t rank) const {
    std::vector<int32_t> others;
    for (int32_t other = 0; other < problem_.num_ranks(); ++other) {
      if (other != rank) others.push_back(other);
    }
    std::sort(others.begin(), others.end(), [&](int32_t x, int32_t y) {
      return finish_of(x) != finish_of(y) ? finish_of(x) < finish_of(y) : x < y;
    });
    return others;
  }

  // What some ranks would hold instead, and when the last of them would finish.
  struct Move {
    std::vector<int32_t> ranks;
    std::vector<std::vector<int32_t>> items;  // [ranks] new items of each
    double finish;
  };

  void apply(const Move& move) {
    for (size_t i = 0; i < move.ranks.size(); ++i) {
      const int32_t rank = move.ranks[i];
      items_[rank] = move.items[i];
      loads_[rank] = 0;
      for (int32_t item : items_[rank]) loads_[rank] += weight(item);
    }
  }

  bool cannot_improve(std::initializer_list<int32_t> ranks, double finish) const {
    double load = 0, speed = 0;
    for (int32_t rank : ranks) {
      load += double(loads_[rank]);
      speed += problem_.speed[rank];
    }
    return load / speed >= finish;  // even a perfect split would not be better
  }

  // The best exact split with any other rank; the first that reaches the goal.
  bool improve_by_pair(int32_t rank) {
    Move best{{}, {}, finish_of(rank)};
    for (int32_t other : others_by_finish(rank)) {
      if (cannot_improve({rank, other}, best.finish)) continue;
      open_windows({rank, other}, kPairWindow);
      const PairSplit split =
          splitter_.solve(window_loads_.data(), int(window_loads_.size()), open_count_[0], base_[0],
                          base_[1], problem_.speed[rank], problem_.speed[other]);
      if (split.finish >= best.finish) continue;
      best = {{rank, other}, kept_, split.finish};
      for (size_t i = 0; i < window_.size(); ++i)
        best.items[split.left_mask >> i & 1 ? 0 : 1].push_back(window_[i]);
      if (split.finish <= goal_) break;
    }
    if (best.ranks.empty()) return false;
    apply(best);
    return true;
  }

  // Any better split of the heaviest rank and two others, lightest first.
  bool improve_by_triple(int32_t rank) {
    const std::vector<int32_t> others = others_by_finish(rank);
    const double before = finish_of(rank);
    for (size_t sum = 1; sum < 2 * others.size();
         ++sum) {  // sum of positions: lightest pairs first
      for (size_t i = sum >= others.size() ? sum - others.size() + 1 : 0; 2 * i < sum; ++i) {
        if (cannot_improve({rank, others[i], others[sum - i]}, before)) continue;
        if (triples_left_-- <= 0) return false;
        if (split_triple({rank, others[i], others[sum - i]}, before)) return true;
      }
    }
    return false;
  }

  bool split_triple(const std::vector<int32_t>& ranks, double before) {
    open_windows(ranks, kTripleWindow);
    const int num_items = int(window_.size());
    const Load total = std::accumulate(window_loads_.begin(), window_loads_.end(), Load{0});
    const double rest_capacity = before * (problem_.speed[ranks[1]] + problem_.speed[ranks[2]]);
    Move best{{}, {}, before};
    // Load of every subset of the window's halves, so that a subset's load is two look-ups.
    constexpr int kHalf = 3 * kTripleWindow / 2;
    Load low[1 << kHalf], high[1 << (3 * kTripleWindow - kHalf)];
    const int num_low = std::min(num_items, kHalf);
    low[0] = high[0] = 0;
    for (uint32_t mask = 1; mask < (1u << num_low); ++mask) {
      low[mask] = low[mask & (mask - 1)] + window_loads_[__builtin_ctz(mask)];
    }
    for (uint32_t mask = 1; mask < (1u << (num_items - num_low)); ++mask) {
      high[mask] = high[mask & (mask - 1)] + window_loads_[num_low + __builtin_ctz(mask)];
    }
    // Subsets of `first_count` window items for the first rank, in Gosper's order.
    const int first_count = open_count_[0];
    for (uint32_t first = (1u << first_count) - 1; first < (1u << num_items);) {
      const Load first_load = low[first & ((1u << num_low) - 1)] + high[first >> num_low];
      const double finish = double(base_[0] + first_load) / problem_.speed[ranks[0]];
      const double rest = double(base_[1] + base_[2] + total - first_load);
      if (finish < best.finish && rest < rest_capacity) {
        rest_items_.clear();
        rest_loads_.clear();
        for (int i = 0; i < num_items; ++i) {
          if (first >> i & 1) continue;
          rest_items_.push_back(window_[i]);
          rest_loads_.push_back(window_loads_[i]);
        }
        const PairSplit split =
            splitter_.solve(rest_loads_.data(), int(rest_loads_.size()), open_count_[1], base_[1],
                            base_[2], problem_.speed[ranks[1]], problem_.speed[ranks[2]]);
        if (std::max(finish, split.finish) < best.finish) {
          best = {ranks, kept_, std::max(finish, split.finish)};
          for (int i = 0; i < num_items; ++i) {
            if (first >> i & 1) best.items[0].push_back(window_[i]);
          }
          for (size_t i = 0; i < rest_items_.size(); ++i) {
            best.items[split.left_mask >> i & 1 ? 1 : 2].push_back(rest_items_[i]);
          }
          if (best.finish <= goal_) break;
        }
      }
      if (first == 0) break;
      const uint32_t low = first & -first, carried = first + low;
      first = (((carried ^ first) >> 2) / low) | carried;
    }
    if (best.ranks.empty()) return false;
    apply(best);
    return true;
  }

  // Takes up to `width` items of each rank into one window. The others stay; the ranks' lists turn, so that
  // all items get their chance in later calls.
  void open_windows(const std::vector<int32_t>& ranks, int width) {
    window_.clear();
    window_loads_.clear();
    kept_.assign(ranks.size(), {});
    for (size_t i = 0; i < ranks.size(); ++i) {
      auto& items = items_[ranks[i]];
      const int count = std::min<int>(int(items.size()), width);
      if (int(items.size()) > width)
        std::rotate(items.begin(), items.begin() + (width + 1) / 2, items.end());
      open_count_[i] = count;
      base_[i] = loads_[ranks[i]];
      for (int at = 0; at < count; ++at) {
        window_.push_back(items[at]);
        window_loads_.push_back(weight(items[at]));
        base_[i] -= window_loads_.back();
      }
      kept_[i].assign(items.begin() + count, items.end());
    }
  }

  // Exchanges random items between the heaviest rank and a few others.
  void disturb(Random& random) {
    const int32_t num_ranks = problem_.num_ranks();
    if (num_ranks < 2) return;
    int32_t rank = heaviest();
    for (int step = 0; step < 3; ++step) {
      const int32_t other = int32_t(random.below(num_ranks));
      if (other == rank || items_[rank].empty() || items_[other].empty()) continue;
      int32_t& mine = items_[rank][random.below(uint32_t(items_[rank].size()))];
      int32_t& theirs = items_[other][random.below(uint32_t(items_[other].size()))];
      loads_[rank] += weight(theirs) - weight(mine);
      loads_[other] += weight(mine) - weight(theirs);
      std::swap(mine, theirs);
      rank = other;
    }
  }

  static constexpr int kPairWindow = PairSplitter::kMaxItems / 2;
  static constexpr int kTripleWindow = 4;

  const BalanceProblem& problem_;
  const BalanceOptions& options_;
  double bound_, goal_;
  int64_t triples_left_;
  std::vector<std::vector<int32_t>> items_;  // [num_ranks][capacity]
  std::vector<Load> loads_;                  // [num_ranks]
  PairSplitter splitter_;
  std::vector<int32_t> window_, rest_items_;  // items that a split may move
  std::vector<Load> window_loads_, rest_loads_;
  std::vector<std::vector<int32_t>> kept_;  // per rank of the split: items that stay
  int open_count_[3] = {0, 0, 0};           // per rank of the split: items it put into the window
  Load base_[3] = {0, 0, 0};                // and its load outside the window
};

}  // namespace

double lower_bound(const BalanceProblem& problem) {
  const std::vector<int32_t> order = heaviest_first(problem.weights);
  const int32_t num_chunks = problem.num_chunks(), num_ranks = problem.num_ranks();
  const Load total = std::accumulate(problem.weights.begin(), problem.weights.end(), Load{0});
  double speed_sum = 0, speed_max = 0, speed_min = 0;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    speed_sum += problem.speed[rank];
    speed_max = std::max(speed_max, problem.speed[rank]);
    speed_min = rank == 0 ? problem.speed[rank] : std::min(speed_min, problem.speed[rank]);
  }
  double bound = double(total) / speed_sum;
  if (num_chunks > 0) bound = std::max(bound, double(problem.weights[order[0]]) / speed_max);
  if (speed_min != speed_max) return bound;
  // Claim:      with equal speeds and `slots` slots a rank, some rank's load is at least the `count` lightest of
  //             the (count - 1) * P + 1 heaviest items plus the slots - count lightest of all items.
  // Because:    by pigeonhole some rank holds `count` of those heaviest; its other slots hold at least the
  //             lightest items (phantoms of weight 0 fill the capacity up).
  // Breaks if:  capacities differ (then only the averages above are used).
  // Tested by:  test/unit/test_balance.py::test_lower_bound_below_exact
  bound = std::ceil(double(total) / num_ranks) / speed_max;
  if (num_chunks == 0) return bound;
  bound = std::max(bound, double(problem.weights[order[0]]) / speed_max);
  const int32_t slots = problem.capacity[0];
  for (int32_t capacity : problem.capacity) {
    if (capacity != slots) return bound;
  }
  const auto ascending = [&](int64_t at) {  // at-th lightest item, phantoms first
    const int64_t phantoms = int64_t(slots) * num_ranks - num_chunks;
    return at < phantoms ? Load{0} : problem.weights[order[num_chunks - 1 - (at - phantoms)]];
  };
  for (int32_t count = 1; count <= slots; ++count) {
    const int64_t heavy = int64_t(count - 1) * num_ranks + 1;
    if (heavy > num_chunks) break;
    Load load = 0;
    for (int64_t at = heavy - count; at < heavy; ++at) load += problem.weights[order[at]];
    for (int32_t at = 0; at < slots - count; ++at) load += ascending(at);
    bound = std::max(bound, double(load) / speed_max);
  }
  return bound;
}

std::vector<int32_t> balance_lpt(const BalanceProblem& problem) {
  std::vector<Load> loads(problem.num_ranks());
  std::vector<int32_t> held(problem.num_ranks()), ranks(problem.num_chunks());
  for (int32_t chunk : heaviest_first(problem.weights)) {
    int32_t best = -1;
    double best_finish = 0;
    for (int32_t rank = 0; rank < problem.num_ranks(); ++rank) {
      if (held[rank] == problem.capacity[rank]) continue;
      const double finish = double(loads[rank] + problem.weights[chunk]) / problem.speed[rank];
      if (best < 0 || finish < best_finish) {
        best = rank;
        best_finish = finish;
      }
    }
    ranks[chunk] = best;
    loads[best] += problem.weights[chunk];
    ++held[best];
  }
  return ranks;
}

Balance balance(const BalanceProblem& problem, const BalanceOptions& options) {
  return Descent(problem, options).run();
}

}  // namespace fm3::planner
