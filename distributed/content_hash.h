// SPDX-License-Identifier: Apache-2.0
// A fast 128-bit fingerprint of memory: tells masks and plans apart by content. Not for adversaries.
#pragma once

#include <cstdint>
#include <cstring>

namespace fm3::planner {

class ContentHash {
 public:
  void update(const void* data, int64_t num_bytes) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    mix(0, uint64_t(num_bytes));
    int64_t at = 0;
    for (; at + 8 * kLanes <= num_bytes; at += 8 * kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        uint64_t word;
        std::memcpy(&word, bytes + at + 8 * lane, 8);
        mix(lane, word);
      }
    }
    for (; at < num_bytes; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + at, size_t(num_bytes - at < 8 ? num_bytes - at : 8));
      mix(int(at / 8 % kLanes), word);
    }
  }
  void digest(unsigned char out[16]) const {
    for (int half = 0; half < 2; ++half) {
      uint64_t word = 0x243F6A8885A308D3ull + uint64_t(half);
      for (int lane = 0; lane < kLanes; ++lane)
        word = finish(word ^ (lanes_[lane] + uint64_t(half) * kOdd));
      std::memcpy(out + 8 * half, &word, 8);
    }
  }

 private:
  static constexpr int kLanes = 4;  // independent chains, so that multiplies overlap
  static constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;

  static uint64_t finish(uint64_t x) {
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
    return x ^ (x >> 32);
  }
  void mix(int lane, uint64_t word) {
    const uint64_t x = (lanes_[lane] ^ word) * kOdd;
    lanes_[lane] = (x << 29 | x >> 35) + kOdd;
  }

  uint64_t lanes_[kLanes] = {1, 2, 3, 4};
};

}  // namespace fm3::planner
