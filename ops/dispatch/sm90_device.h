// SPDX-License-Identifier: Apache-2.0
// The device the Hopper kernels are asked to run on.
#pragma once

#include <cstdint>
#include <string>

namespace fm3::sm90 {

// Empty if the current device can run the kernels (`num_sms` is then how many multiprocessors they may
// fill), else why not.
std::string check_device(int32_t* num_sms);

}  // namespace fm3::sm90
