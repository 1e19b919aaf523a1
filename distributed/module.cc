// SPDX-License-Identifier: Apache-2.0
// Python's view of the planner: arrays in, arrays out, the interpreter lock released while it computes.
// Checked argument by argument in paddle_fm3/distributed/; here only what would read out of bounds.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "balance.h"
#include "block_balance.h"
#include "content_hash.h"
#include "localize.h"
#include "needs.h"
#include "node_groups.h"
#include "route.h"
#include "tile_scan.h"
#include "timeline.h"
#include "workload.h"

namespace py = pybind11;
using namespace fm3::planner;

namespace {

template <typename T>
using Array =
    py::array_t<T, py::array::c_style>;  // no forcecast: a wrong dtype is an error, not a copy

template <typename T>
std::vector<T> to_vector(const Array<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

template <typename T, typename U>
Array<U> to_array(const std::vector<T>& values, std::vector<py::ssize_t> shape) {
  static_assert(sizeof(T) % sizeof(U) == 0);
  Array<U> array(std::move(shape));
  if (size_t(array.nbytes()) != values.size() * sizeof(T))
    throw std::logic_error("planner: shape of a result");
  if (!values.empty()) std::memcpy(array.mutable_data(), values.data(), values.size() * sizeof(T));
  return array;
}

template <typename T, typename U>
std::vector<T> rows_to_structs(const Array<U>& array) {
  constexpr py::ssize_t width = sizeof(T) / sizeof(U);
  if (array.ndim() != 2 || array.shape(1) != width)
    throw py::value_error("planner: table has the wrong width");
  std::vector<T> values(size_t(array.shape(0)));
  if (!values.empty()) std::memcpy(values.data(), array.data(), values.size() * sizeof(T));
  return values;
}

// A mask whose arrays stay alive as long as this object.
struct Mask {
  Array<int32_t> lt_begin, lt_end, ut_begin, ut_end;
  std::optional<Array<int32_t>> block_mask;
  MaskColumns columns;

  Mask(Array<int32_t> lt_begin_in, Array<int32_t> lt_end_in, Array<int32_t> ut_begin_in,
       Array<int32_t> ut_end_in, int32_t s_q, bool is_causal,
       std::optional<Array<int32_t>> block_mask_in)
      : lt_begin(lt_begin_in),
        lt_end(lt_end_in),
        ut_begin(ut_begin_in),
        ut_end(ut_end_in),
        block_mask(block_mask_in) {
    if (lt_begin.ndim() != 3) throw py::value_error("planner: bounds must be [b, h_mask, s_k]");
    for (const auto* bound : {&lt_end, &ut_begin, &ut_end}) {
      if (bound->size() != lt_begin.size()) throw py::value_error("planner: bounds differ in size");
    }
    columns = {lt_begin.data(),
               lt_end.data(),
               ut_begin.data(),
               ut_end.data(),
               block_mask ? block_mask->data() : nullptr,
               int32_t(lt_begin.shape(0) * lt_begin.shape(1)),
               s_q,
               int32_t(lt_begin.shape(2)),
               is_causal};
  }
};

struct Scan {
  std::shared_ptr<Mask> mask;
  ChunkGrid grid;
  TileScan tiles;
  std::optional<std::vector<Need>> needs;

  Scan(std::shared_ptr<Mask> mask_in, const Array<int32_t>& chunk_begins)
      : mask(std::move(mask_in)), grid(to_vector(chunk_begins)) {
    if (grid.s() != mask->columns.s_q)
      throw py::value_error("planner: chunks do not cover the mask's query rows");
    py::gil_scoped_release release;
    tiles = scan_tiles(mask->columns);
  }
  const std::vector<Need>& find() {
    if (!needs) needs = find_needs(mask->columns, tiles, grid);
    return *needs;
  }
};

RankNeeds to_rank_needs(const Array<int32_t>& begins, const Array<int32_t>& runs) {
  return {to_vector(begins), rows_to_structs<Run, int32_t>(runs)};
}

py::tuple from_route(const Route& route, int32_t num_ranks, int32_t num_stages) {
  const auto transfers = [](const std::vector<Transfer>& list) {
    return to_array<Transfer, int32_t>(list, {py::ssize_t(list.size()), 8});
  };
  return py::make_tuple(
      to_array<int32_t, int32_t>(route.range_begins, {num_ranks + 1}),
      to_array<KeyRange, int32_t>(route.ranges, {py::ssize_t(route.ranges.size()), 2}),
      to_array<int32_t, int32_t>(route.stage_rows, {num_ranks, num_stages + 2}),
      transfers(route.gather), transfers(route.reduce));
}

py::list from_messages(const std::vector<Message>& messages) {
  py::list list;
  for (const Message& message : messages) {
    list.append(py::make_tuple(message.stage, message.hop, message.src_rank, message.dst_rank,
                               message.num_rows, message.begin_us, message.end_us));
  }
  return list;
}

py::tuple run_timeline(const Array<int32_t>& gather, const std::optional<Array<int32_t>>& reduce,
                       const Array<int32_t>& node_of_rank, const Array<int32_t>& stage_rows,
                       const Array<int32_t>& stage_place, const Array<int32_t>& step_stages,
                       const Array<double>& step_us, std::pair<double, double> fast,
                       std::pair<double, double> slow, double reduce_row_factor,
                       bool with_messages) {
  const auto transfers = rows_to_structs<Transfer, int32_t>(gather);
  const TimelineProblem problem{&transfers,
                                to_vector(node_of_rank),
                                int32_t(stage_rows.shape(1)) - 2,
                                to_vector(stage_rows),
                                to_vector(stage_place),
                                to_vector(step_stages),
                                to_vector(step_us),
                                {fast.first, fast.second},
                                {slow.first, slow.second}};
  std::vector<Transfer> back;
  if (reduce) back = rows_to_structs<Transfer, int32_t>(*reduce);
  Timeline timeline;
  {
    py::gil_scoped_release release;
    timeline = run_gather(problem);
    if (reduce) run_reduce(problem, back, reduce_row_factor, timeline);
  }
  const std::vector<py::ssize_t> shape{problem.num_ranks(), problem.num_steps()};
  return py::make_tuple(to_array<double, double>(timeline.step_begin_us, shape),
                        to_array<double, double>(timeline.step_end_us, shape),
                        to_array<double, double>(timeline.finish_us, {problem.num_ranks()}),
                        with_messages ? from_messages(timeline.gather) : py::list(),
                        with_messages ? from_messages(timeline.reduce) : py::list());
}

BalanceProblem to_problem(const Array<int64_t>& weights, const Array<int32_t>& capacity,
                          const Array<double>& speed) {
  BalanceProblem problem{to_vector(weights), to_vector(capacity), to_vector(speed)};
  int64_t slots = 0;
  for (int32_t count : problem.capacity) slots += count;
  if (problem.speed.size() != problem.capacity.size() || slots < problem.num_chunks()) {
    throw py::value_error(
        "planner: capacities must cover all chunks, one capacity and speed a rank");
  }
  return problem;
}

py::tuple from_balance(const Balance& result) {
  return py::make_tuple(
      to_array<int32_t, int32_t>(result.ranks, {py::ssize_t(result.ranks.size())}), result.finish,
      result.lower_bound);
}

}  // namespace

PYBIND11_MODULE(_planner, m) {
  m.doc() = "Native half of paddle_fm3.distributed's planner; see its Python modules.";

  py::class_<Mask, std::shared_ptr<Mask>>(m, "Mask").def(
      py::init<Array<int32_t>, Array<int32_t>, Array<int32_t>, Array<int32_t>, int32_t, bool,
               std::optional<Array<int32_t>>>());

  py::class_<Scan>(m, "Scan")
      .def(py::init<std::shared_ptr<Mask>, const Array<int32_t>&>())
      .def("chunk_tiles",
           [](const Scan& scan) {
             std::vector<ChunkTiles> counts;
             {
               py::gil_scoped_release release;
               counts = count_chunk_tiles(scan.tiles, scan.grid);
             }
             return to_array<ChunkTiles, int64_t>(counts, {py::ssize_t(counts.size()), 2});
           })
      .def("needs",
           [](Scan& scan) {
             const auto& needs = scan.find();
             return to_array<Need, int32_t>(needs, {py::ssize_t(needs.size()), 4});
           })
      .def("rank_needs",
           [](Scan& scan, const Array<int32_t>& chunk_ranks, int32_t num_ranks,
              int32_t coalesce_rows, int32_t align_rows) {
             RankNeeds needs;
             {
               const auto owners = to_vector(chunk_ranks);
               py::gil_scoped_release release;
               needs = needs_of_ranks(scan.find(), owners, num_ranks, scan.mask->columns.num_planes,
                                      coalesce_rows, align_rows, scan.mask->columns.s_k);
             }
             return py::make_tuple(
                 to_array<int32_t, int32_t>(needs.begins, {num_ranks + 1}),
                 to_array<Run, int32_t>(needs.runs, {py::ssize_t(needs.runs.size()), 2}));
           })
      .def("balance_by_node",
           [](Scan& scan, const Array<int64_t>& weights, const Array<int32_t>& capacity,
              const Array<double>& speed, const Array<int32_t>& node_of_rank, double us_per_load,
              double us_per_row, double target_gap, int64_t max_triples, int32_t max_kicks,
              int64_t max_steps, int32_t block) {
             to_problem(weights, capacity, speed);  // checks
             if (node_of_rank.size() != capacity.size())
               throw py::value_error("planner: one node a rank");
             if (weights.size() != scan.grid.num_chunks())
               throw py::value_error("planner: one weight a chunk");
             const NodeProblem problem{to_vector(weights),
                                       to_vector(capacity),
                                       to_vector(speed),
                                       to_vector(node_of_rank),
                                       us_per_load,
                                       us_per_row,
                                       block};
             Balance result;
             {
               py::gil_scoped_release release;
               result = balance_by_node(problem, scan.find(), scan.grid,
                                        {target_gap, max_triples, max_kicks}, max_steps);
             }
             return from_balance(result);
           });

  m.def("lower_bound", [](const Array<int64_t>& weights, const Array<int32_t>& capacity,
                          const Array<double>& speed) {
    return lower_bound(to_problem(weights, capacity, speed));
  });
  m.def("balance_lpt", [](const Array<int64_t>& weights, const Array<int32_t>& capacity,
                          const Array<double>& speed) {
    const auto ranks = balance_lpt(to_problem(weights, capacity, speed));
    return to_array<int32_t, int32_t>(ranks, {py::ssize_t(ranks.size())});
  });
  m.def("balance", [](const Array<int64_t>& weights, const Array<int32_t>& capacity,
                      const Array<double>& speed, double target_gap, int64_t max_triples,
                      int32_t max_kicks, int32_t block) {
    const BalanceProblem problem = to_problem(weights, capacity, speed);
    Balance result;
    {
      py::gil_scoped_release release;
      result = balance_in_blocks(problem, block, {target_gap, max_triples, max_kicks});
    }
    return from_balance(result);
  });
  m.def("balance_paper", [](const Array<int64_t>& weights, int32_t num_ranks, int32_t last_phase) {
    if (num_ranks < 1 || weights.size() % num_ranks != 0) {
      throw py::value_error("balance_paper: the paper's IPO needs num_chunks % num_ranks == 0");
    }
    const auto values = to_vector(weights);
    PaperBalance result;
    {
      py::gil_scoped_release release;
      result = balance_paper(values, num_ranks, last_phase);
    }
    return py::make_tuple(
        to_array<int32_t, int32_t>(result.ranks, {py::ssize_t(result.ranks.size())}),
        result.max_load, result.p3_successes);
  });

  m.def("foreign_rows", [](const Array<int32_t>& chunk_begins, const Array<int32_t>& chunk_ranks,
                           const Array<int32_t>& node_of_rank, const Array<int32_t>& need_begins,
                           const Array<int32_t>& need_runs) {
    const ForeignRows rows = count_foreign_rows(to_rank_needs(need_begins, need_runs),
                                                ChunkGrid(to_vector(chunk_begins)),
                                                to_vector(chunk_ranks), to_vector(node_of_rank));
    const auto array = [](const std::vector<int64_t>& values) {
      return to_array<int64_t, int64_t>(values, {py::ssize_t(values.size())});
    };
    return py::make_tuple(array(rows.fast_of_rank), array(rows.slow_of_rank),
                          array(rows.slow_of_node));
  });
  m.def("route", [](const Array<int32_t>& chunk_begins, const Array<int32_t>& chunk_ranks,
                    const Array<int32_t>& node_of_rank, const Array<int32_t>& need_begins,
                    const Array<int32_t>& need_runs, bool is_hierarchical, int32_t num_stages,
                    bool has_single_step, int32_t piece_rows) {
    const ChunkGrid grid(to_vector(chunk_begins));
    const RouteProblem problem{&grid,
                               to_vector(chunk_ranks),
                               to_vector(node_of_rank),
                               is_hierarchical,
                               num_stages,
                               has_single_step,
                               piece_rows};
    const RankNeeds needs = to_rank_needs(need_begins, need_runs);
    Route route;
    {
      py::gil_scoped_release release;
      route = route_needs(problem, needs);
    }
    return from_route(route, problem.num_ranks(), num_stages);
  });
  m.def("route_ring", [](const Array<int32_t>& chunk_begins, const Array<int32_t>& chunk_ranks,
                         const Array<int32_t>& node_of_rank) {
    const ChunkGrid grid(to_vector(chunk_begins));
    const RouteProblem problem{
        &grid, to_vector(chunk_ranks), to_vector(node_of_rank), false, 1, false, 1};
    return from_route(route_ring(problem), problem.num_ranks(),
                      std::max(1, problem.num_ranks() - 1));
  });
  m.def("localize", [](const Mask& mask, const Array<int32_t>& chunk_begins,
                       const Array<int32_t>& chunk_ranks, int32_t rank,
                       const Array<int32_t>& ranges) {
    const ChunkGrid grid(to_vector(chunk_begins));
    if (grid.s() != mask.columns.s_q)
      throw py::value_error("planner: chunks do not cover the mask's query rows");
    const auto keys = rows_to_structs<KeyRange, int32_t>(ranges);
    py::ssize_t num_keys = 0;
    for (const KeyRange& range : keys) {
      if (range.k_begin < 0 || range.num_rows < 0 ||
          range.k_begin + range.num_rows > mask.columns.s_k) {
        throw py::value_error("localize: a key range leaves the mask's columns");
      }
      num_keys += range.num_rows;
    }
    const std::vector<py::ssize_t> shape{mask.lt_begin.shape(0), mask.lt_begin.shape(1), num_keys};
    Array<int32_t> lt_begin(shape), lt_end(shape), ut_begin(shape), ut_end(shape);
    const LocalBounds out{lt_begin.mutable_data(), lt_end.mutable_data(), ut_begin.mutable_data(),
                          ut_end.mutable_data()};
    std::string problem;
    {
      const auto owners = to_vector(chunk_ranks);
      py::gil_scoped_release release;
      problem = localize(mask.columns, grid, owners, rank, keys, out);
    }
    if (!problem.empty()) throw py::value_error("localize_mask: " + problem);
    return py::make_tuple(lt_begin, lt_end, ut_begin, ut_end);
  });
  m.def("timeline", &run_timeline);
  m.def("content_hash", [](const std::vector<py::buffer>& buffers) {
    ContentHash hash;
    for (const py::buffer& buffer : buffers) {
      const py::buffer_info info = buffer.request();
      py::ssize_t expected = info.itemsize;
      for (py::ssize_t axis = info.ndim - 1; axis >= 0; --axis) {
        if (info.shape[axis] > 1 && info.strides[axis] != expected) {
          throw py::value_error("content_hash: needs C-contiguous memory");
        }
        expected *= info.shape[axis];
      }
      hash.update(info.ptr, info.size * info.itemsize);
    }
    unsigned char digest[16];
    hash.digest(digest);
    return py::bytes(reinterpret_cast<const char*>(digest), sizeof(digest));
  });
}
