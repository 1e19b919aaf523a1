// SPDX-License-Identifier: Apache-2.0
// Result of a C ABI call. 0 is success; the text of the last failure on this thread is kept.
#pragma once

#include <cstdint>

namespace fm3 {

enum class Status : int32_t {
  kOk = 0,
  kInvalidArgument = 1,  // a value breaks the contract; the message names it
  kUnsupported = 2,      // legal, but this backend does not serve it; the message says what would
  kBackendError = 3,     // the CUDA runtime or the operating system reported an error
};

}  // namespace fm3
