// SPDX-License-Identifier: Apache-2.0
// The CPU backend behind the C ABI: cuts a checked call into work items and runs them on threads.
#pragma once

#include "ops/cpu/kernels.h"

namespace fm3::cpu {

// Kernels of the best target this machine has, or of the one chosen by set_simd_target.
const KernelTable& kernels();

// `target` is a KernelTable name, or "" for the best. Returns false if the machine lacks it.
bool set_simd_target(const char* target);

// Both expect parameters that check_params.h accepts. Throw std::bad_alloc or std::system_error.
void run_forward(const FwdParams& params);
void run_backward(const BwdParams& params);

}  // namespace fm3::cpu
