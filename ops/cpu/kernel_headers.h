// SPDX-License-Identifier: Apache-2.0
// Everything the kernels include, in one place so that it is compiled before a target is chosen.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>

#include "fm3/mask.h"
#include "fm3/params.h"
#include "fm3/schedule.h"
#include "ops/cpu/kernels.h"

#define FM3_STRINGIFY_VALUE(x) #x
#define FM3_STRINGIFY(x) FM3_STRINGIFY_VALUE(x)
