// SPDX-License-Identifier: Apache-2.0
// Argument checks of the C ABI that hold for every backend.
#pragma once

#include <string>

#include "fm3/params.h"

namespace fm3 {

// Empty if the parameters keep the contract, else one sentence with names and values.
std::string check_params(const FwdParams& params);
std::string check_params(const BwdParams& params);
std::string check_mask(const MaskView& mask);

}  // namespace fm3
