// SPDX-License-Identifier: Apache-2.0
// The C ABI of every compiled backend: what the framework binding, ctypes and the benchmarks call.
// Names are fm3_<backend>_<what>, backend in {cpu, sm90}. Every call returns fm3::Status as int32;
// the message of the last failure on the calling thread is fm3_<backend>_last_error().
// *_workspace_bytes and *_schedule_bytes look at sizes, dtype, flags and whether there is a block_mask, never through a
// data pointer; -1 means that the backend does not serve such a call, and last_error says why and what would.
#pragma once

#include <cstdint>

#include "fm3/params.h"
#include "fm3/schedule.h"
#include "fm3/status.h"

#define FM3_EXPORT extern "C" __attribute__((visibility("default")))

// --- CPU (libfm3_cpu.so) ---------------------------------------------------------------------
FM3_EXPORT int32_t fm3_cpu_fwd(const fm3::FwdParams* params);
FM3_EXPORT int32_t fm3_cpu_bwd(const fm3::BwdParams* params);
FM3_EXPORT int64_t fm3_cpu_fwd_workspace_bytes(const fm3::FwdParams* params);
FM3_EXPORT int64_t fm3_cpu_bwd_workspace_bytes(const fm3::BwdParams* params);
// Writes [b, h_mask, ceil(s_k/block_k)] summaries (the definition of the schedule). With
// block_k = kBlockMaskTile the array may be given as params.schedule.
FM3_EXPORT int32_t fm3_cpu_build_schedule(const fm3::MaskView* mask, int32_t block_k,
                                          fm3::KeyTileSummary* summaries);
FM3_EXPORT void fm3_cpu_set_num_threads(int32_t num_threads);  // 0: all cores
FM3_EXPORT const char* fm3_cpu_simd_target();                  // e.g. "avx512"
// "avx512", "avx2", "baseline", or "" for the best; kUnsupported if this machine lacks it (tests).
FM3_EXPORT int32_t fm3_cpu_set_simd_target(const char* target);
FM3_EXPORT const char* fm3_cpu_last_error();
// Bytes of a struct of this interface as the library knows it, by name ("BwdParams"); -1: it does not.
FM3_EXPORT int64_t fm3_cpu_struct_bytes(const char* name);

// --- Hopper (libfm3_sm90.so); `stream` is a cudaStream_t ---------------------------------------
FM3_EXPORT int32_t fm3_sm90_fwd(const fm3::FwdParams* params, void* stream);
FM3_EXPORT int32_t fm3_sm90_bwd(const fm3::BwdParams* params, void* stream);
FM3_EXPORT int64_t fm3_sm90_fwd_workspace_bytes(const fm3::FwdParams* params);
FM3_EXPORT int64_t fm3_sm90_bwd_workspace_bytes(const fm3::BwdParams* params);
// Device bytes and content of a prepared schedule (params.schedule), reusable by the forward of every
// layer with this mask; opaque to callers.
FM3_EXPORT int64_t fm3_sm90_schedule_bytes(const fm3::MaskView* mask);
FM3_EXPORT int32_t fm3_sm90_build_schedule(const fm3::MaskView* mask, void* schedule, void* stream);
// The first pass of fm3_sm90_build_schedule alone, the only one that reads all bounds: to time it.
FM3_EXPORT int32_t fm3_sm90_scan_bounds(const fm3::MaskView* mask, void* schedule, void* stream);
// Likewise for the backward (params.bwd_schedule): device bytes, and content, enqueued on `stream`. Up to 4,194,240
// keys, where a call that makes its own lists serves twice as many at head dims up to 128 and at 192/128. A call's
// workspace is smaller with one: ask for its bytes with the same params.bwd_schedule.
FM3_EXPORT int64_t fm3_sm90_bwd_schedule_bytes(const fm3::MaskView* mask);
FM3_EXPORT int32_t fm3_sm90_build_bwd_schedule(const fm3::BwdSchedule* bwd_schedule, void* stream);
FM3_EXPORT const char* fm3_sm90_last_error();
FM3_EXPORT int64_t fm3_sm90_struct_bytes(const char* name);  // also of fm3/device_api.h

// --- Paddle op (libfm3_op.so), which hands its callers' tensors on to the two above ---------------
FM3_EXPORT int64_t fm3_op_struct_bytes(const char* name);
