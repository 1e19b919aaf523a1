// SPDX-License-Identifier: Apache-2.0
// Worker threads for the CPU kernels.
//
// Own threads rather than OpenMP: the process already holds Paddle's OpenMP runtime (and often a
// second one from NumPy), whose thread counts, spinning and fork behaviour belong to the framework.
#pragma once

#include <cstdint>
#include <functional>

namespace fm3::cpu {

// 0 means one thread a core that this process may run on.
void set_num_threads(int32_t num_threads);
int32_t num_threads();

// Calls body(item_idx, thread_idx) once for every item in [0, num_items); thread_idx < num_threads.
// Items are handed out in ascending order, one at a time; the caller works too. Every thread runs
// with the caller's floating-point environment (rounding, flush-to-zero), so results do not depend
// on which thread takes an item. If another call is using the workers, the caller does all items.
void parallel_for(int32_t num_threads, int64_t num_items,
                  const std::function<void(int64_t item_idx, int32_t thread_idx)>& body);

}  // namespace fm3::cpu
