// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "fm3/mask.h"

namespace fm3::sm90 {

// f(form) with the mask's form as a constant.
template <class Function>
auto with_form(BoundForm form, Function function) {
  switch (form) {
    case BoundForm::kLower1:
      return function(std::integral_constant<BoundForm, BoundForm::kLower1>());
    case BoundForm::kLower2:
      return function(std::integral_constant<BoundForm, BoundForm::kLower2>());
    case BoundForm::kOuter2:
      return function(std::integral_constant<BoundForm, BoundForm::kOuter2>());
    case BoundForm::kBoth4:
      return function(std::integral_constant<BoundForm, BoundForm::kBoth4>());
    default:
      return function(std::integral_constant<BoundForm, BoundForm::kNone>());
  }
}

}  // namespace fm3::sm90
