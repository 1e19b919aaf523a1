// SPDX-License-Identifier: Apache-2.0
// The CPU half of the C ABI: check, run, turn exceptions into a status.
#include <exception>
#include <string>

#include "fm3/c_api.h"
#include "fm3/struct_bytes.h"
#include "ops/cpu/attention.h"
#include "ops/cpu/thread_pool.h"
#include "ops/dispatch/check_params.h"
#include "ops/schedule/build_schedule.h"

namespace {

thread_local std::string last_error;

int32_t fail(fm3::Status status, const char* function, const std::string& message) {
  last_error = std::string(function) + ": " + message;
  return static_cast<int32_t>(status);
}

// Runs `body` if `error` is empty. No exception crosses the C ABI.
template <typename Body>
int32_t guarded(const char* function, const std::string& error, const Body& body) {
  if (!error.empty()) return fail(fm3::Status::kInvalidArgument, function, error);
  try {
    body();
  } catch (const std::bad_alloc&) {
    return fail(fm3::Status::kBackendError, function, "out of memory for scratch space");
  } catch (const std::exception& exception) {
    return fail(fm3::Status::kBackendError, function, exception.what());
  }
  return static_cast<int32_t>(fm3::Status::kOk);
}

}  // namespace

int32_t fm3_cpu_fwd(const fm3::FwdParams* params) {
  std::string error = params == nullptr ? "params is nullptr" : fm3::check_params(*params);
  if (error.empty() && params->ready_rows != nullptr) {
    error = "ready_rows is set; the cpu backend takes keys that are all in";
  }
  return guarded("fm3_cpu_fwd", error, [&] { fm3::cpu::run_forward(*params); });
}

int32_t fm3_cpu_bwd(const fm3::BwdParams* params) {
  std::string error = params == nullptr ? "params is nullptr" : fm3::check_params(*params);
  // Passed over, either would leave somebody wrong or waiting for ever.
  if (error.empty() && params->ready_rows != nullptr) {
    error = "ready_rows is set; the cpu backend takes keys that are all in";
  } else if (error.empty() && params->sent_word != nullptr) {
    error = "sent_word is set; the cpu backend sets none: its gradients are written on return";
  }
  return guarded("fm3_cpu_bwd", error, [&] { fm3::cpu::run_backward(*params); });
}

// Scratch is O(threads * tile) and kept off the interface.
int64_t fm3_cpu_fwd_workspace_bytes(const fm3::FwdParams*) { return 0; }
int64_t fm3_cpu_bwd_workspace_bytes(const fm3::BwdParams*) { return 0; }

int32_t fm3_cpu_build_schedule(const fm3::MaskView* mask, int32_t block_k,
                               fm3::KeyTileSummary* summaries) {
  std::string error = mask == nullptr ? "mask is nullptr" : fm3::check_mask(*mask);
  if (error.empty() && block_k < 1) error = "block_k=" + std::to_string(block_k) + "; must be >= 1";
  if (error.empty() && summaries == nullptr && int64_t{mask->b} * mask->h_mask * mask->s_k > 0) {
    error = "summaries is nullptr";
  }
  return guarded("fm3_cpu_build_schedule", error,
                 [&] { fm3::build_schedule(*mask, block_k, summaries); });
}

void fm3_cpu_set_num_threads(int32_t num_threads) { fm3::cpu::set_num_threads(num_threads); }

const char* fm3_cpu_simd_target() { return fm3::cpu::kernels().name; }

int32_t fm3_cpu_set_simd_target(const char* target) {
  const std::string name = target == nullptr ? "" : target;
  if (fm3::cpu::set_simd_target(name.c_str())) return static_cast<int32_t>(fm3::Status::kOk);
  return fail(fm3::Status::kUnsupported, "fm3_cpu_set_simd_target",
              "target=\"" + name +
                  "\" is not compiled in or not served by this processor; known: " +
                  "avx512, avx2, baseline, \"\" (the best)");
}

const char* fm3_cpu_last_error() { return last_error.c_str(); }

int64_t fm3_cpu_struct_bytes(const char* name) { return fm3::bytes_of(fm3::kStructBytes, name); }
