// SPDX-License-Identifier: Apache-2.0
#include "island_split.h"

#include <algorithm>
#include <numeric>

namespace fm3::planner {
namespace {

constexpr int kRounds = 8;       // of falling tolerance
constexpr int kMoves = 256;      // tried a round, in all bisections
constexpr int kLeastMoves = 64;  // tried a round in each
constexpr double kFirstTolerance =
    0.12;  // share of the rows that a move may cost in the first round
constexpr double kRowsPerUneven =
    8.0;  // uneven load of 1 % counts as much as 8 % of the rows crossing
constexpr size_t kMaxTiesPerChunk = 4;  // more, and the mask has no islands to speak of

struct Tie {
  int32_t island;  // the other one
  int64_t rows;    // needed across if the two are on different sides
};

struct Island {
  std::vector<int32_t> chunks;  // ascending
  std::vector<Tie> ties;
  int64_t rows = 0;
  double load = 0;      // of one chunk, mean
  int32_t on_left = 0;  // chunks
  int32_t count() const { return int32_t(chunks.size()); }
  bool is_cut() const { return on_left > 0 && on_left < count(); }
};

// The same numbers on every machine, so that every rank finds the same plan.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(0x9e3779b97f4a7c15 * (seed + 1)) {}
  int32_t below(int32_t end) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return int32_t(((state_ >> 32) * uint64_t(end)) >> 32);
  }

 private:
  uint64_t state_;
};

// Rows that cross if the islands are dealt as `on_left` says. A cut island costs its rows: either side fetches what
// the other owns. A tie costs only between whole islands: a cut one has a chunk for either side.
class Bisection {
 public:
  Bisection(std::vector<Island>& islands, int32_t left_count, double left_share)
      : islands_(islands), left_count_(left_count) {
    for (const Island& island : islands_) {
      total_load_ += island.load * island.count();
      total_rows_ += island.rows;
    }
    left_goal_ = total_load_ * left_share;
    cost_per_load_ = kRowsPerUneven * double(total_rows_) /
                     std::max(1.0, std::min(left_goal_, total_load_ - left_goal_));
  }

  void run(int num_moves, Random& random) {
    fill_left();
    const int32_t num_islands = int32_t(islands_.size());
    if (num_islands < 2) return;
    double now = cost(), best = now;
    std::vector<int32_t> best_left = lefts();
    for (int round = 0; round < kRounds; ++round) {
      const double tolerance =
          kFirstTolerance * double(total_rows_) * double(kRounds - 1 - round) / double(kRounds);
      for (int move = 0; move < num_moves; ++move) {
        const int32_t giver = random.below(num_islands), taker = random.below(num_islands);
        const int32_t most =
            std::min(islands_[giver].on_left, islands_[taker].count() - islands_[taker].on_left);
        if (giver == taker || most == 0) continue;
        const int32_t how = random.below(3);
        const int32_t moved = how == 0 ? most : how == 1 ? 1 : 1 + random.below(most);
        const double change = cost_of_exchange(giver, taker, moved, tolerance);
        if (change > tolerance) continue;
        exchange(giver, taker, moved);
        now += change;
        if (now < best - 1e-6) {
          best = now;
          best_left = lefts();
        }
      }
    }
    for (int32_t i = 0; i < num_islands; ++i) islands_[i].on_left = best_left[i];
  }

 private:
  void fill_left() {
    int32_t room = left_count_;
    for (Island& island : islands_) {
      island.on_left = std::min(room, island.count());
      room -= island.on_left;
      left_load_ += island.load * island.on_left;
    }
  }

  std::vector<int32_t> lefts() const {
    std::vector<int32_t> values;
    for (const Island& island : islands_) values.push_back(island.on_left);
    return values;
  }

  double uneven_cost(double left_load) const {
    return left_load > left_goal_ ? (left_load - left_goal_) * cost_per_load_
                                  : (left_goal_ - left_load) * cost_per_load_;
  }

  int64_t rows_of(const Island& island) const {
    if (island.is_cut()) return island.rows;
    int64_t rows = 0;
    for (const Tie& tie : island.ties) {
      const Island& other = islands_[tie.island];
      if (!other.is_cut() && (other.on_left > 0) != (island.on_left > 0)) rows += tie.rows;
    }
    return rows;
  }

  double cost() const {
    double rows = 0, ties = 0;
    for (const Island& island : islands_)
      (island.is_cut() ? rows : ties) += double(rows_of(island));
    return rows + ties / 2 + uneven_cost(left_load_);
  }

  // Chunks of `giver` go to the right and as many of `taker` to the left.
  void exchange(int32_t giver, int32_t taker, int32_t moved) {
    islands_[giver].on_left -= moved;
    islands_[taker].on_left += moved;
    left_load_ = load_after(giver, taker, moved);
  }
  double load_after(int32_t giver, int32_t taker, int32_t moved) const {
    return left_load_ + double(moved) * (islands_[taker].load - islands_[giver].load);
  }

  // What the exchange adds to the cost; if that is above `tolerance`, perhaps less than it adds.
  double cost_of_exchange(int32_t giver, int32_t taker, int32_t moved, double tolerance) {
    Island &x = islands_[giver], &y = islands_[taker];
    const double uneven = uneven_cost(load_after(giver, taker, moved)) - uneven_cost(left_load_);
    const bool stay_cut =
        x.is_cut() && y.is_cut() && x.on_left > moved && y.on_left + moved < y.count();
    if (stay_cut) return uneven;
    // A tie between the two counts twice, before and after alike.
    const int64_t before = rows_of(x) + rows_of(y);
    if (uneven - double(before) > tolerance) return uneven - double(before);
    x.on_left -= moved;
    y.on_left += moved;
    const int64_t after = rows_of(x) + rows_of(y);
    x.on_left += moved;
    y.on_left -= moved;
    return uneven + double(after - before);
  }

  std::vector<Island>& islands_;
  int32_t left_count_;
  double left_goal_ = 0, left_load_ = 0, total_load_ = 0, cost_per_load_ = 0;
  int64_t total_rows_ = 0;
};

class Splitter {
 public:
  Splitter(const NodeProblem& problem, const std::vector<Node>& nodes,
           const std::vector<int32_t>& chunks_per_node, const Segments& segments, uint64_t seed)
      : problem_(problem),
        nodes_(nodes),
        chunks_per_node_(chunks_per_node),
        segments_(segments),
        node_of_chunk_(problem.num_chunks()),
        random_(seed) {}

  std::vector<int32_t> take() { return std::move(node_of_chunk_); }

  // Islands for chunks that are dealt together; ties are found anew, for parts of islands have fewer.
  bool split(std::vector<std::vector<int32_t>> groups, size_t node_begin, size_t node_end) {
    if (node_end - node_begin == 1) {
      for (const auto& group : groups) {
        for (int32_t chunk : group) node_of_chunk_[chunk] = int32_t(node_begin);
      }
      return true;
    }
    const size_t node_mid = (node_begin + node_end) / 2;
    int32_t left_count = 0;
    double left_speed = 0, speed = 0;
    for (size_t node = node_begin; node < node_end; ++node) {
      speed += nodes_[node].speed;
      if (node >= node_mid) continue;
      left_count += chunks_per_node_[node];
      left_speed += nodes_[node].speed;
    }
    std::vector<Island> islands;
    if (!describe(groups, islands)) return false;
    const int num_moves = std::max(kLeastMoves, kMoves / int(nodes_.size() - 1));
    Bisection(islands, left_count, left_speed / speed).run(num_moves, random_);
    std::vector<std::vector<int32_t>> left, right;
    for (const Island& island : islands) deal(islands, island, left, right);
    return split(std::move(left), node_begin, node_mid) &&
           split(std::move(right), node_mid, node_end);
  }

 private:
  bool describe(std::vector<std::vector<int32_t>>& groups, std::vector<Island>& islands) {
    std::sort(groups.begin(), groups.end());  // in the order of their first chunks
    island_of_chunk_.assign(problem_.num_chunks(), -1);
    size_t num_chunks = 0, num_ties = 0;
    for (size_t i = 0; i < groups.size(); ++i) {
      for (int32_t chunk : groups[i]) island_of_chunk_[chunk] = int32_t(i);
      num_chunks += groups[i].size();
    }
    islands.resize(groups.size());
    for (size_t i = 0; i < groups.size(); ++i) {
      Island& island = islands[i];
      island.chunks = std::move(groups[i]);
      for (int32_t chunk : island.chunks) {
        island.load += double(problem_.weights[chunk]) / double(island.chunks.size());
        const Run own = segments_.of_chunk(chunk);
        for (int32_t segment = own.begin; segment < own.end; ++segment)
          island.rows += segments_.rows(segment);
        num_ties += add_ties(chunk, int32_t(i), islands);
        if (num_ties > kMaxTiesPerChunk * num_chunks) return false;
      }
    }
    return true;
  }

  // What `chunk` of island `own` needs of other islands, chunk by chunk of theirs.
  size_t add_ties(int32_t chunk, int32_t own, std::vector<Island>& islands) {
    size_t num_ties = 0;
    for (const Run& run : segments_.needed_by(chunk)) {
      int32_t owner = segments_.chunk_of(run.begin);
      for (int32_t segment = run.begin; segment < run.end; ++owner) {
        const int32_t end = std::min(run.end, segments_.of_chunk(owner).end);
        const int32_t other = island_of_chunk_[owner];
        const int64_t rows = segments_.rows_between(segment, end);
        segment = end;
        if (other < 0 || other == own) continue;
        num_ties += tie(islands[own], other, rows);
        tie(islands[other], own, rows);
      }
    }
    return num_ties;
  }

  static bool tie(Island& island, int32_t other, int64_t rows) {
    for (Tie& known : island.ties) {
      if (known.island == other) {
        known.rows += rows;
        return false;
      }
    }
    island.ties.push_back({other, rows});
    return true;
  }

  // Of a cut island, the end next to a whole island goes to that island's side: the chunk there sees both.
  void deal(const std::vector<Island>& islands, const Island& island,
            std::vector<std::vector<int32_t>>& left, std::vector<std::vector<int32_t>>& right) {
    const auto side_of = [&](int32_t chunk) {  // 1 left, -1 right, 0 either
      if (chunk < 0 || chunk >= problem_.num_chunks() || island_of_chunk_[chunk] < 0) return 0;
      const Island& other = islands[island_of_chunk_[chunk]];
      return other.is_cut() ? 0 : other.on_left > 0 ? 1 : -1;
    };
    const int32_t count = island.count(), on_left = island.on_left;
    const int before = side_of(island.chunks.front() - 1),
              after = side_of(island.chunks.back() + 1);
    // Left chunks are [begin, begin + on_left), cyclically: at the end if only that pulls left.
    int32_t begin = 0;
    if (before < 0 || (before == 0 && after > 0)) begin = count - on_left;
    if (before > 0 && after > 0) begin = count - 1;
    if (before < 0 && after < 0 && on_left < count - 1) begin = 1;
    std::vector<int32_t> to_left, to_right;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t place = (i - begin + count) % count;
      (place < on_left ? to_left : to_right).push_back(island.chunks[i]);
    }
    if (!to_left.empty()) left.push_back(std::move(to_left));
    if (!to_right.empty()) right.push_back(std::move(to_right));
  }

  const NodeProblem& problem_;
  const std::vector<Node>& nodes_;
  const std::vector<int32_t>& chunks_per_node_;
  const Segments& segments_;
  std::vector<int32_t> node_of_chunk_;
  std::vector<int32_t> island_of_chunk_;  // [num_chunks] -1: not dealt here
  Random random_;
};

}  // namespace

std::vector<int32_t> split_islands(const NodeProblem& problem, const std::vector<Node>& nodes,
                                   const std::vector<int32_t>& chunks_per_node,
                                   const Segments& segments,
                                   const std::vector<std::vector<int32_t>>& islands,
                                   uint64_t seed) {
  Splitter splitter(problem, nodes, chunks_per_node, segments, seed);
  if (!splitter.split(islands, 0, nodes.size())) return {};
  return splitter.take();
}

}  // namespace fm3::planner
