// SPDX-License-Identifier: Apache-2.0
#include "timeline.h"

#include <algorithm>
#include <tuple>

namespace fm3::planner {
namespace {

// One message per (stage, hop, src, dst), in an order in which each rank meets its peers in turn: at any time
// different ranks talk to different peers.
std::vector<Message> to_messages(const std::vector<Transfer>& transfers, int32_t num_ranks) {
  std::vector<Message> messages;
  for (const Transfer& transfer : transfers) {
    messages.push_back({transfer.stage, transfer.hop, transfer.src_rank, transfer.dst_rank,
                        transfer.num_rows, transfer.dst_row, 0, 0});
  }
  const auto key = [num_ranks](const Message& message) {
    return std::make_tuple(message.stage, message.hop,
                           (message.dst_rank - message.src_rank + num_ranks) % num_ranks,
                           message.src_rank);
  };
  std::sort(messages.begin(), messages.end(),
            [&](const Message& x, const Message& y) { return key(x) < key(y); });
  size_t kept = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (kept > 0 && key(messages[kept - 1]) == key(messages[i])) {
      messages[kept - 1].num_rows += messages[i].num_rows;
      messages[kept - 1].last_dst_row =
          std::max(messages[kept - 1].last_dst_row, messages[i].last_dst_row);
    } else {
      messages[kept++] = messages[i];
    }
  }
  messages.resize(kept);
  return messages;
}

// Calls `function(first, last)` for the messages of each (stage, hop).
template <typename Function>
void for_each_group(std::vector<Message>& messages, const Function& function) {
  for (size_t first = 0, last; first < messages.size(); first = last) {
    for (last = first; last < messages.size() && messages[last].stage == messages[first].stage &&
                       messages[last].hop == messages[first].hop;) {
      ++last;
    }
    function(messages.data() + first, messages.data() + last);
  }
}

// Each rank has one sender and one receiver on each of the two links.
class Links {
 public:
  Links(const TimelineProblem& problem, double row_factor)
      : problem_(problem), row_factor_(row_factor) {
    for (auto* free_at : {&fast_out_, &fast_in_, &slow_out_, &slow_in_})
      free_at->assign(problem.num_ranks(), 0);
  }
  // Senders take their messages of one group in the order in which they are ready; receivers in the order in which
  // they were sent. The two ends do not block each other: the network between them holds what is under way.
  template <typename ReadyUs>
  void send_all(Message* first, Message* last, const ReadyUs& ready_us) {
    const auto by_begin = [](const Message& x, const Message& y) {
      return x.begin_us < y.begin_us;
    };
    for (Message* message = first; message != last; ++message)
      message->begin_us = ready_us(*message);
    std::stable_sort(first, last, by_begin);
    for (Message* message = first; message != last; ++message) {
      double& out = (is_slow(*message) ? slow_out_ : fast_out_)[message->src_rank];
      message->begin_us = std::max(message->begin_us, out);
      out = message->begin_us + busy_us(*message);
    }
    std::stable_sort(first, last, by_begin);
    for (Message* message = first; message != last; ++message) {
      double& in = (is_slow(*message) ? slow_in_ : fast_in_)[message->dst_rank];
      in = std::max(message->begin_us, in) + busy_us(*message);
      message->end_us = in + link(*message).latency_us;
    }
  }

 private:
  bool is_slow(const Message& message) const {
    return problem_.node_of_rank[message.src_rank] != problem_.node_of_rank[message.dst_rank];
  }
  const Link& link(const Message& message) const {
    return is_slow(message) ? problem_.slow : problem_.fast;
  }
  double busy_us(const Message& message) const {
    return double(message.num_rows) * link(message).us_per_row * row_factor_;
  }

  const TimelineProblem& problem_;
  double row_factor_;
  std::vector<double> fast_out_, fast_in_, slow_out_, slow_in_;  // [num_ranks] free from then on
};

}  // namespace

Timeline run_gather(const TimelineProblem& problem) {
  const int32_t num_ranks = problem.num_ranks(), num_steps = problem.num_steps();
  const int32_t stride = problem.num_stages + 2;
  Timeline timeline;
  std::vector<Transfer> in_turn = *problem.transfers;
  for (Transfer& transfer : in_turn) transfer.stage = problem.stage_place[transfer.stage];
  timeline.gather = to_messages(in_turn, num_ranks);
  // Relays: the stage whose arrival at the sender a message needs (0: the sender's own rows).
  std::vector<std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t>>> relays(
      num_ranks);  // stage, hop, dst, needs
  for (const Transfer& transfer : in_turn) {
    const int32_t* rows = &problem.stage_rows[size_t(transfer.src_rank) * stride];
    const int32_t needed =
        int32_t(std::upper_bound(rows + 1, rows + stride - 1, transfer.src_row) - (rows + 1));
    if (needed > 0) {
      relays[transfer.src_rank].emplace_back(transfer.stage, transfer.hop, transfer.dst_rank,
                                             problem.stage_place[needed]);
    }
  }
  for (auto& list : relays) std::sort(list.begin(), list.end());
  std::vector<double> arrived(size_t(num_ranks) * (problem.num_stages + 1));  // hop 0 of the stage
  std::vector<double> all_arrived(size_t(num_ranks) * (problem.num_stages + 1));  // every hop
  Links links(problem, 1.0);
  const auto ready_us = [&](const Message& message) {
    double ready = 0;
    const auto& list = relays[message.src_rank];
    for (auto it =
             std::lower_bound(list.begin(), list.end(),
                              std::make_tuple(message.stage, message.hop, message.dst_rank, 0));
         it != list.end() && std::get<0>(*it) == message.stage && std::get<1>(*it) == message.hop &&
         std::get<2>(*it) == message.dst_rank;
         ++it) {
      ready = std::max(
          ready, arrived[size_t(message.src_rank) * (problem.num_stages + 1) + std::get<3>(*it)]);
    }
    return ready;
  };
  for_each_group(timeline.gather, [&](Message* first, Message* last) {
    links.send_all(first, last, ready_us);
    for (const Message* message = first; message != last; ++message) {
      const size_t at = size_t(message->dst_rank) * (problem.num_stages + 1) + message->stage;
      all_arrived[at] = std::max(all_arrived[at], message->end_us);
      if (message->hop == 0) arrived[at] = std::max(arrived[at], message->end_us);
    }
  });
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    double now = 0, in_by = 0;
    int32_t stage = 0;
    for (int32_t step = 0; step < num_steps; ++step) {
      for (; stage <= problem.stage_place[problem.step_stages[step]]; ++stage) {
        in_by = std::max(in_by, all_arrived[size_t(rank) * (problem.num_stages + 1) + stage]);
      }
      const double busy_us = problem.step_us[size_t(rank) * num_steps + step];
      const double begin = busy_us > 0 ? std::max(now, in_by) : now;
      timeline.step_begin_us.push_back(begin);
      now = begin + busy_us;
      timeline.step_end_us.push_back(now);
    }
    timeline.finish_us.push_back(now);
  }
  return timeline;
}

void run_reduce(const TimelineProblem& problem, const std::vector<Transfer>& reduce,
                double row_factor, Timeline& timeline) {
  const int32_t num_steps = problem.num_steps();
  timeline.reduce = to_messages(reduce, problem.num_ranks());
  const int32_t stride = problem.num_stages + 2;
  std::vector<double> received(problem.num_ranks());  // latest arrival of any gradient
  std::vector<double> to_relay(problem.num_ranks());  // latest arrival of gradients to pass on
  Links links(problem, row_factor);
  const auto ready_us = [&](const Message& message) {
    const size_t step = size_t(std::min(message.stage, num_steps - 1));
    return std::max(timeline.step_end_us[size_t(message.src_rank) * num_steps + step],
                    to_relay[message.src_rank]);
  };
  for_each_group(timeline.reduce, [&](Message* first, Message* last) {
    links.send_all(first, last, ready_us);
    for (const Message* message = first; message != last; ++message) {
      received[message->dst_rank] = std::max(received[message->dst_rank], message->end_us);
      if (message->last_dst_row >= problem.stage_rows[size_t(message->dst_rank) * stride + 1]) {
        to_relay[message->dst_rank] = std::max(to_relay[message->dst_rank], message->end_us);
      }
    }
  });
  for (int32_t rank = 0; rank < problem.num_ranks(); ++rank) {
    timeline.finish_us[rank] = std::max(timeline.finish_us[rank], received[rank]);
  }
}

}  // namespace fm3::planner
