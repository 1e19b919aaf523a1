// SPDX-License-Identifier: Apache-2.0
// The C ABI that context parallelism on GPUs is built from, in libfm3_sm90.so: sums and merges of
// partial results, and just enough of the CUDA runtime to order copies between ranks. Streams are
// cudaStream_t, events cudaEvent_t. Calls return fm3::Status, fm3_sm90_last_error() says why.
#pragma once

#include <cstdint>

#include "fm3/c_api.h"
#include "fm3/rows.h"

// --- Rows ----------------------------------------------------------------------------------------
FM3_EXPORT int32_t fm3_sm90_sum_parts(const fm3::SumPartsParams* params, void* stream);
// `count` tensors in one launch, up to kMostRowTensors (K and V), of the same b, dtype and is_out_float32.
FM3_EXPORT int32_t fm3_sm90_sum_rows(const fm3::SumRowsParams* params, int32_t count, void* stream);
FM3_EXPORT int32_t fm3_sm90_pack(const fm3::PackParams* params, int32_t count,
                                 const fm3::PackWords* words,
                                 void* stream);  // words: may be nullptr
FM3_EXPORT int32_t fm3_sm90_merge(const fm3::MergeParams* params, void* stream);
// Changes the order of a prepared schedule, once.
FM3_EXPORT int32_t fm3_sm90_order_local_first(const fm3::MaskView* mask, void* schedule,
                                              const fm3::LocalFirst* first, void* stream);
FM3_EXPORT int32_t fm3_sm90_check_same(const fm3::CheckSameParams* params, void* stream);

// --- Room ----------------------------------------------------------------------------------------
// Attention kernels fill the GPU and stay until they are done; a transfer that needs multiprocessors of
// its own would wait for them. Launches of the calling thread leave `count` free from now on; 0: none.
FM3_EXPORT int32_t fm3_sm90_reserve_sms(int32_t count);

// Name of the current device among all of the machine, as text with a 0 at its end.
FM3_EXPORT int32_t fm3_sm90_device_name(char* name, int64_t bytes);

// --- Memory --------------------------------------------------------------------------------------
FM3_EXPORT int32_t fm3_sm90_malloc(int64_t bytes, void** pointer);
FM3_EXPORT int32_t fm3_sm90_free(void* pointer);
// Maps `bytes` of host memory, page-aligned; *device_pointer is its address for kernels.
FM3_EXPORT int32_t fm3_sm90_host_register(void* host, int64_t bytes, void** device_pointer);
FM3_EXPORT int32_t fm3_sm90_host_unregister(void* host);
// Memory of fm3_sm90_malloc as another process sees it. A handle is kIpcHandleBytes bytes.
FM3_EXPORT int32_t fm3_sm90_ipc_export(void* pointer, void* handle);
FM3_EXPORT int32_t fm3_sm90_ipc_open(const void* handle, void** pointer);
FM3_EXPORT int32_t fm3_sm90_ipc_close(void* pointer);

// --- Streams, events, copies ---------------------------------------------------------------------
FM3_EXPORT int32_t fm3_sm90_stream_create(void** stream);
FM3_EXPORT int32_t fm3_sm90_stream_destroy(void* stream);
FM3_EXPORT int32_t fm3_sm90_event_create(int32_t has_time, void** event);
FM3_EXPORT int32_t fm3_sm90_event_destroy(void* event);
FM3_EXPORT int32_t fm3_sm90_event_record(void* event, void* stream);
FM3_EXPORT int32_t fm3_sm90_event_wait(void* event, void* stream);
FM3_EXPORT int32_t fm3_sm90_event_elapsed(void* begin, void* end, float* ms);  // waits for `end`
// *is_done: everything enqueued on the stream has run. Does not wait.
FM3_EXPORT int32_t fm3_sm90_stream_is_done(void* stream, int32_t* is_done);
// `count` copies in no set order, by copy engines, so that they run beside a kernel that holds every
// multiprocessor. `stream` must not be the default stream.
FM3_EXPORT int32_t fm3_sm90_copy(void* const* to, const void* const* from, const int64_t* bytes,
                                 int64_t count, void* stream);
// A word (4-byte aligned, device memory or registered host memory): written when the stream gets
// there, after what was enqueued before; and waited for until (int32)(*word - value) >= 0.
FM3_EXPORT int32_t fm3_sm90_write_word(void* stream, void* word, uint32_t value);
FM3_EXPORT int32_t fm3_sm90_wait_word(void* stream, void* word, uint32_t value);
