// SPDX-License-Identifier: Apache-2.0
// How the op reports an error.
#pragma once

#include <sstream>

#if FM3_PADDLE_MAJOR >= 3
#include "paddle/common/enforce.h"
#else
#include "paddle/extension.h"
#endif

namespace fm3::binding {

// Raises "fm3_attention: " and the parts, one after another; in Python a ValueError (Paddle 2: RuntimeError).
// NOTE: PD_THROW's exception ends the process, its message unseen, when a saved program of Paddle 3 runs
// the op; Paddle 2's PADDLE_THROW asks for the headers of cuBLAS and cuDNN.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  text << "fm3_attention: ";
  (text << ... << parts);
#if FM3_PADDLE_MAJOR >= 3
  PADDLE_THROW(common::errors::InvalidArgument("%s", text.str()));
#else
  PD_THROW(text.str());
#endif
}

}  // namespace fm3::binding
