// SPDX-License-Identifier: Apache-2.0
#include "route.h"

#include <tuple>

namespace fm3::planner {
namespace {

// Local row of a global row at its owner: chunks in ascending order, whatever the assignment.
class OwnRows {
 public:
  explicit OwnRows(const RouteProblem& problem)
      : problem_(problem), count_(problem.num_ranks()), chunks_(problem.num_ranks()) {
    for (int32_t chunk = 0; chunk < problem.grid->num_chunks(); ++chunk) {
      int32_t& count = count_[problem.chunk_ranks[chunk]];
      first_.push_back(count);
      count += problem.grid->rows(chunk);
      chunks_[problem.chunk_ranks[chunk]].push_back(chunk);
    }
  }
  int32_t at(int32_t k_idx, int32_t chunk) const {
    return first_[chunk] + k_idx - problem_.grid->begin(chunk);
  }
  int32_t count(int32_t rank) const { return count_[rank]; }
  const std::vector<int32_t>& chunks(int32_t rank) const { return chunks_[rank]; }

 private:
  const RouteProblem& problem_;
  std::vector<int32_t> first_;                // [num_chunks]
  std::vector<int32_t> count_;                // [num_ranks]
  std::vector<std::vector<int32_t>> chunks_;  // [num_ranks] ascending
};

// One rank's want of rows that another rank owns. Wants of one group are the same rows, wanted by ranks of
// one node; over the slow link they travel once.
struct Want {
  int32_t rank, owner;
  int32_t k_begin, k_end, chunk;
  int32_t group;
  bool is_slow;
  int32_t stage = 0;
  int32_t buffer_row = 0;
};

struct Group {
  int32_t first, count;  // consecutive wants
};

class Router {
 public:
  Router(const RouteProblem& problem, const RankNeeds& needs)
      : problem_(problem), needs_(needs), own_rows_(problem) {}

  Route run() {
    collect_wants();
    assign_stages();
    lay_out_buffers();
    write_transfers();
    return std::move(route_);
  }

 private:
  int32_t node(int32_t rank) const { return problem_.node_of_rank[rank]; }

  // Needed runs cut at chunk boundaries, own chunks left out.
  struct Piece {
    int32_t k_begin, k_end, chunk;
  };
  struct RankPiece {
    int32_t rank;
    Piece piece;
  };
  void foreign_pieces(int32_t rank, std::vector<Piece>& pieces) const {
    pieces.clear();
    const ChunkGrid& grid = *problem_.grid;
    for (int32_t i = needs_.begins[rank]; i < needs_.begins[rank + 1]; ++i) {
      const Run run = needs_.runs[i];
      for (int32_t chunk = grid.chunk_of(run.begin), begin = run.begin; begin < run.end; ++chunk) {
        const int32_t end = std::min(run.end, grid.end(chunk));
        if (problem_.chunk_ranks[chunk] != rank) pieces.push_back({begin, end, chunk});
        begin = end;
      }
    }
  }

  void add_want(int32_t rank, const Piece& piece, bool is_slow) {
    wants_.push_back({rank, problem_.chunk_ranks[piece.chunk], piece.k_begin, piece.k_end,
                      piece.chunk, int32_t(groups_.size()) - 1, is_slow});
    ++groups_.back().count;
  }

  void collect_wants() {
    int32_t num_nodes = 0;
    for (int32_t rank = 0; rank < problem_.num_ranks(); ++rank)
      num_nodes = std::max(num_nodes, node(rank) + 1);
    std::vector<std::vector<int32_t>> ranks_of_node(num_nodes);
    for (int32_t rank = 0; rank < problem_.num_ranks(); ++rank)
      ranks_of_node[node(rank)].push_back(rank);
    std::vector<Piece> pieces;
    std::vector<RankPiece> slow;
    for (const auto& ranks : ranks_of_node) {
      slow.clear();
      for (const int32_t rank : ranks) {
        foreign_pieces(rank, pieces);
        for (const Piece& piece : pieces) {
          const bool is_slow = node(problem_.chunk_ranks[piece.chunk]) != node(rank);
          if (is_slow && problem_.is_hierarchical) {
            slow.push_back({rank, piece});
          } else {
            groups_.push_back({int32_t(wants_.size()), 0});
            add_want(rank, piece, is_slow);
          }
        }
      }
      group_shared_pieces(slow);
    }
  }

  // Cuts the pieces of a node's ranks at each other's ends, chunk by chunk, so that each part is wanted wholly
  // by some of the ranks.
  void group_shared_pieces(std::vector<RankPiece>& pieces) {
    std::sort(pieces.begin(), pieces.end(), [](const RankPiece& x, const RankPiece& y) {
      return std::tie(x.piece.chunk, x.rank, x.piece.k_begin) <
             std::tie(y.piece.chunk, y.rank, y.piece.k_begin);
    });
    std::vector<int32_t> cuts;
    for (size_t first = 0, last; first < pieces.size(); first = last) {
      cuts.clear();
      const int32_t chunk = pieces[first].piece.chunk;
      for (last = first; last < pieces.size() && pieces[last].piece.chunk == chunk; ++last) {
        cuts.push_back(pieces[last].piece.k_begin);
        cuts.push_back(pieces[last].piece.k_end);
      }
      std::sort(cuts.begin(), cuts.end());
      cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
      for (size_t cut = 0; cut + 1 < cuts.size(); ++cut) {
        for (int32_t begin = cuts[cut]; begin < cuts[cut + 1];) {
          // NOTE: a short remainder joins the last piece.
          const int32_t left = cuts[cut + 1] - begin;
          const int32_t end =
              left < 2 * problem_.piece_rows ? cuts[cut + 1] : begin + problem_.piece_rows;
          groups_.push_back({int32_t(wants_.size()), 0});
          for (size_t i = first; i < last; ++i) {
            if (pieces[i].piece.k_begin <= begin && begin < pieces[i].piece.k_end) {
              add_want(pieces[i].rank, {begin, end, chunk}, true);
            }
          }
          if (groups_.back().count == 0) groups_.pop_back();
          begin = end;
        }
      }
    }
  }

  // Near rows first: they come over the fast link and cover the wait for the others. Slow rows of a node are
  // taken in the same order by all its ranks, so that a relayed row is early for all.
  void assign_stages() {
    const int32_t num_ranks = problem_.num_ranks();
    std::vector<std::vector<int32_t>> by_rank(num_ranks);
    for (int32_t want = 0; want < int32_t(wants_.size()); ++want)
      by_rank[wants_[want].rank].push_back(want);
    std::vector<std::pair<uint64_t, int32_t>> keyed;  // (place in the rank's order, want)
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      keyed.clear();
      for (int32_t id : by_rank[rank]) {
        const Want& want = wants_[id];
        const int32_t distance = want.is_slow ? node(want.owner) - node(rank) : want.owner - rank;
        const uint64_t ahead = uint64_t(distance < 0 ? distance + num_ranks : distance);
        // Near before far over the slow link, by distance, then by row. 16 bits of distance: 64K ranks.
        keyed.emplace_back(
            uint64_t(want.is_slow) << 62 | ahead << 40 | uint64_t(uint32_t(want.k_begin)), id);
      }
      std::sort(keyed.begin(), keyed.end());
      for (size_t i = 0; i < keyed.size(); ++i) by_rank[rank][i] = keyed[i].second;
      int64_t total = 0, before = 0;
      for (int32_t id : by_rank[rank]) total += wants_[id].k_end - wants_[id].k_begin;
      for (int32_t id : by_rank[rank]) {
        const int64_t rows = wants_[id].k_end - wants_[id].k_begin;
        const int64_t cut = (before + rows / 2) * problem_.num_stages / std::max<int64_t>(total, 1);
        wants_[id].stage = 1 + int32_t(std::min<int64_t>(cut, problem_.num_stages - 1));
        before += rows;
      }
    }
    // All members of a group take their rows in one stage (the middle of what each would choose), so that a stage
    // needs nothing from another one: backward runs the stages in the opposite order.
    for (const Group& group : groups_) {
      int32_t sum = 0;
      for (int32_t i = 0; i < group.count; ++i) sum += wants_[group.first + i].stage;
      for (int32_t i = 0; i < group.count; ++i)
        wants_[group.first + i].stage = (sum + group.count / 2) / group.count;
    }
    by_rank_ = std::move(by_rank);
  }

  void lay_out_buffers() {
    route_.range_begins.push_back(0);
    for (int32_t rank = 0; rank < problem_.num_ranks(); ++rank) {
      auto& ids = by_rank_[rank];
      std::sort(ids.begin(), ids.end(), [&](int32_t x, int32_t y) {
        const Want &want_x = wants_[x], &want_y = wants_[y];
        return want_x.stage != want_y.stage ? want_x.stage < want_y.stage
                                            : want_x.k_begin < want_y.k_begin;
      });
      for (int32_t chunk : own_rows_.chunks(rank))
        append_range(problem_.grid->begin(chunk), problem_.grid->rows(chunk));
      int32_t row = own_rows_.count(rank), stage = 0;
      route_.stage_rows.push_back(0);
      for (int32_t id : ids) {
        while (stage < wants_[id].stage) {
          route_.stage_rows.push_back(row);
          ++stage;
        }
        wants_[id].buffer_row = row;
        append_range(wants_[id].k_begin, wants_[id].k_end - wants_[id].k_begin);
        row += wants_[id].k_end - wants_[id].k_begin;
      }
      while (stage++ <= problem_.num_stages) route_.stage_rows.push_back(row);
      route_.range_begins.push_back(int32_t(route_.ranges.size()));
    }
  }

  void append_range(int32_t k_begin, int32_t num_rows) {
    const bool is_first = int32_t(route_.ranges.size()) == route_.range_begins.back();
    if (!is_first && route_.ranges.back().k_begin + route_.ranges.back().num_rows == k_begin) {
      route_.ranges.back().num_rows += num_rows;
    } else {
      route_.ranges.push_back({k_begin, num_rows});
    }
  }

  // Claim:      along `gather`, every want is delivered once, from a buffer that already holds the rows; along
  //             `reduce`, every rank's gradient of every row it wanted reaches the owner exactly once.
  // Because:    a group is a star inside one node around its gateway, which alone talks to the owner; all its
  //             edges have one stage, hop 0 before hop 1; reduce uses the same edges backwards.
  // Breaks if:  members of a group were in different stages.
  // Tested by:  test/unit/test_route.py::test_every_row_arrives_once_and_gradients_count_each_rank_once
  void write_transfers() {
    std::vector<int64_t> slow_rows(problem_.num_ranks());  // received over the slow link so far
    for (const Group& group : groups_) {
      const Want* wants = &wants_[group.first];
      int32_t gateway = 0;
      for (int32_t i = 1; i < group.count; ++i) {
        if (slow_rows[wants[i].rank] < slow_rows[wants[gateway].rank]) gateway = i;
      }
      const Want& first = wants[gateway];
      const int32_t rows = first.k_end - first.k_begin,
                    owner_row = own_rows_.at(first.k_begin, first.chunk);
      const int32_t stage = first.stage, step = step_of(stage);
      if (first.is_slow) slow_rows[first.rank] += rows;
      route_.gather.push_back(
          {stage, 0, first.owner, first.rank, first.k_begin, rows, owner_row, first.buffer_row});
      route_.reduce.push_back({step, group.count > 1 ? 1 : 0, first.rank, first.owner,
                               first.k_begin, rows, first.buffer_row, owner_row});
      for (int32_t i = 0; i < group.count; ++i) {
        if (i == gateway) continue;
        route_.gather.push_back({stage, 1, first.rank, wants[i].rank, first.k_begin, rows,
                                 first.buffer_row, wants[i].buffer_row});
        route_.reduce.push_back({step, 0, wants[i].rank, first.rank, first.k_begin, rows,
                                 wants[i].buffer_row, first.buffer_row});
      }
    }
    sort_and_join(route_.gather);
    sort_and_join(route_.reduce);
  }

  // Backward computes far stages first: their gradients have the longest way and then the most time.
  int32_t step_of(int32_t stage) const {
    return problem_.has_single_step ? 0 : problem_.num_stages + 1 - stage;
  }

  static void sort_and_join(std::vector<Transfer>& transfers) {
    const auto key = [](const Transfer& x) {  // (stage, hop, src, dst) in one number
      return (uint64_t(uint32_t(x.stage)) * 2 + uint64_t(x.hop)) << 40 |
             uint64_t(x.src_rank) << 20 | uint64_t(x.dst_rank);
    };
    std::sort(transfers.begin(), transfers.end(), [&](const Transfer& x, const Transfer& y) {
      const uint64_t key_x = key(x), key_y = key(y);
      return key_x != key_y ? key_x < key_y : x.dst_row < y.dst_row;
    });
    size_t kept = 0;
    for (size_t i = 0; i < transfers.size(); ++i) {
      const Transfer& next = transfers[i];
      Transfer* last = kept == 0 ? nullptr : &transfers[kept - 1];
      if (last != nullptr && last->stage == next.stage && last->hop == next.hop &&
          last->src_rank == next.src_rank && last->dst_rank == next.dst_rank &&
          last->k_begin + last->num_rows == next.k_begin &&
          last->src_row + last->num_rows == next.src_row &&
          last->dst_row + last->num_rows == next.dst_row) {
        last->num_rows += next.num_rows;
      } else {
        transfers[kept++] = next;
      }
    }
    transfers.resize(kept);
  }

  const RouteProblem& problem_;
  const RankNeeds& needs_;
  OwnRows own_rows_;
  std::vector<Want> wants_;
  std::vector<Group> groups_;
  std::vector<std::vector<int32_t>> by_rank_;  // [num_ranks] ids of wants
  Route route_;
};

}  // namespace

Route route_needs(const RouteProblem& problem, const RankNeeds& needs) {
  return Router(problem, needs).run();
}

Route route_ring(const RouteProblem& problem) {
  const OwnRows own_rows(problem);
  const int32_t num_ranks = problem.num_ranks(), num_stages = num_ranks - 1;
  std::vector<std::vector<KeyRange>> chunks(num_ranks);
  for (int32_t chunk = 0; chunk < problem.grid->num_chunks(); ++chunk) {
    chunks[problem.chunk_ranks[chunk]].push_back(
        {problem.grid->begin(chunk), problem.grid->rows(chunk)});
  }
  Route route;
  route.range_begins.push_back(0);
  std::vector<int32_t> begins(size_t(num_ranks) *
                              num_ranks);  // [rank][stage] buffer row where its block begins
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    int32_t row = 0;
    for (int32_t stage = 0; stage < num_ranks; ++stage) {
      const int32_t owner = (rank - stage + num_ranks) % num_ranks;
      route.stage_rows.push_back(row);
      begins[size_t(rank) * num_ranks + stage] = row;
      row += own_rows.count(owner);
      route.ranges.insert(route.ranges.end(), chunks[owner].begin(), chunks[owner].end());
    }
    if (num_stages == 0) route.stage_rows.push_back(row);
    route.stage_rows.push_back(row);
    route.range_begins.push_back(int32_t(route.ranges.size()));
  }
  for (int32_t stage = 1; stage <= num_stages; ++stage) {
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      const int32_t owner = (rank - stage + num_ranks) % num_ranks;
      const int32_t before = (rank - 1 + num_ranks) % num_ranks, after = (rank + 1) % num_ranks;
      const int32_t row = begins[size_t(rank) * num_ranks + stage];
      const int32_t row_before = begins[size_t(before) * num_ranks + stage - 1];
      const int32_t row_after =
          stage == num_stages ? 0 : begins[size_t(after) * num_ranks + stage + 1];
      int32_t offset = 0;
      for (const KeyRange& chunk : chunks[owner]) {
        route.gather.push_back({stage, 0, before, rank, chunk.k_begin, chunk.num_rows,
                                row_before + offset, row + offset});
        route.reduce.push_back({stage, 0, rank, after, chunk.k_begin, chunk.num_rows, row + offset,
                                row_after + offset});
        offset += chunk.num_rows;
      }
    }
  }
  return route;
}

}  // namespace fm3::planner
