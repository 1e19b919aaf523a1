// SPDX-License-Identifier: Apache-2.0
// Sizes of the structs that a library takes through the C ABI, by name: callers from another build see that they do not
// fit before the first call.
#pragma once

#include <cstdint>
#include <cstring>

#include "fm3/params.h"
#include "fm3/schedule.h"

namespace fm3 {

struct NamedBytes {
  const char* name;
  int64_t bytes;
};

#define FM3_NAMED_BYTES(type) \
  fm3::NamedBytes { #type, sizeof(fm3::type) }

inline constexpr NamedBytes kStructBytes[] = {
    FM3_NAMED_BYTES(MaskView),  FM3_NAMED_BYTES(Strides),       FM3_NAMED_BYTES(Shape),
    FM3_NAMED_BYTES(FwdParams), FM3_NAMED_BYTES(BwdParams),     FM3_NAMED_BYTES(BwdSchedule),
    FM3_NAMED_BYTES(RowRun),    FM3_NAMED_BYTES(KeyTileSummary)};

// -1: not among `table`.
template <int kCount>
int64_t bytes_of(const NamedBytes (&table)[kCount], const char* name) {
  for (const NamedBytes& one : table) {
    if (name != nullptr && std::strcmp(one.name, name) == 0) return one.bytes;
  }
  return -1;
}

}  // namespace fm3
