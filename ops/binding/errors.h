// SPDX-License-Identifier: Apache-2.0
// How the op reports an error.
#pragma once

#include <sstream>

#include "paddle/common/enforce.h"

namespace fm3::binding {

// Raises "fm3_attention: " and the parts, one after another; in Python a ValueError.
// NOTE: PD_THROW's exception ends the process, its message unseen, when a saved program runs the op.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  text << "fm3_attention: ";
  (text << ... << parts);
  PADDLE_THROW(common::errors::InvalidArgument("%s", text.str()));
}

}  // namespace fm3::binding
