// SPDX-License-Identifier: Apache-2.0
// The error text of the Hopper half of the C ABI, one a thread.
#pragma once

#include <string>

#include "fm3/status.h"

namespace fm3::sm90 {

// Keeps "function: message" for fm3_sm90_last_error and returns the status.
int32_t fail(Status status, const char* function, const std::string& message);

}  // namespace fm3::sm90
