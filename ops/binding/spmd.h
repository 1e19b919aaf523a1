// SPDX-License-Identifier: Apache-2.0
// How the ops run on dist tensors: batch and head shards stay where they are, anything else of the
// inputs is gathered first.
#pragma once

#include "paddle/extension.h"

namespace fm3::binding {

extern const paddle::InferSpmdFunc kForwardSpmd;
extern const paddle::InferSpmdFunc kBackwardSpmd;

}  // namespace fm3::binding
