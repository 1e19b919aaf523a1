// SPDX-License-Identifier: Apache-2.0
// Exact split of two ranks' chunks: which go left so that the later of the two finishes earliest.
#pragma once

#include <cstdint>
#include <vector>

namespace fm3::planner {

using Load = int64_t;

struct PairSplit {
  uint32_t left_mask;  // bit i: item i goes left
  double finish;       // max(left load / left speed, right load / right speed)
};

// Meet in the middle over exactly `num_left` of the items; at most kMaxItems of them.
class PairSplitter {
 public:
  static constexpr int kMaxItems = 20;
  // items: loads of both ranks. base_*: load that does not take part and stays where it is.
  PairSplit solve(const Load* items, int num_items, int num_left, Load base_left, Load base_right,
                  double speed_left, double speed_right);

 private:
  struct Subset {
    Load sum;
    uint32_t mask;
  };
  using ByCount = std::vector<std::vector<Subset>>;  // [count] ascending by sum
  static constexpr int kMaxDirectItems = 10;
  PairSplit solve_directly(const Load* items, int num_items, int num_left, Load base_left,
                           Load base_right, double speed_left, double speed_right);
  void list_subsets(const Load* items, int num_items, int first_bit, ByCount& out);
  ByCount low_, high_;
  std::vector<Subset> merged_;
  std::vector<uint16_t> subsets_[kMaxDirectItems + 1]
                                [kMaxDirectItems + 1];  // [items][left] masks, made when needed
};

}  // namespace fm3::planner
