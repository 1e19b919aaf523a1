// SPDX-License-Identifier: Apache-2.0
// Enough of CUDA C++ to run kernels on the host, thread by thread: each CUDA thread is a fiber, which
// runs until it meets a barrier or a warp-wide instruction whose other threads have not come yet.
// One CTA at a time. Warp-wide instructions want all 32 lanes; a CTA whose threads wait for each other
// in vain ends the program with a message.
#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  uint32_t x = 1, y = 1, z = 1;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace cuda_on_host {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

struct Barrier {
  int expected = 0, arrived = 0;
  uint64_t generation = 0;
  void release_if_full() {
    if (expected > 0 && arrived == expected) arrived = 0, ++generation;
  }
};

struct Fiber {
  ucontext_t start;
  jmp_buf place;
  bool has_started = false, is_done = false;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
};

struct Cta {
  std::vector<Fiber> fibers;
  std::vector<Barrier> warps;
  std::vector<std::vector<uint64_t>> values;  // per warp: two rounds of 32
  Barrier all;
  int current = 0;
  bool has_moved = false;
  jmp_buf scheduler;
  ucontext_t ended;
  std::function<void()> body;
};
inline Cta cta;

inline void wait_at(Barrier& barrier) {
  const uint64_t generation = barrier.generation;
  ++barrier.arrived;
  cta.has_moved = true;
  barrier.release_if_full();
  while (barrier.generation == generation) {
    Fiber& fiber = cta.fibers[cta.current];
    if (_setjmp(fiber.place) == 0) _longjmp(cta.scheduler, 1);
  }
}

inline void enter() {
  cta.body();
  cta.fibers[cta.current].is_done = true;
  cta.has_moved = true;
  Barrier& warp = cta.warps[cta.current / kWarp];
  --warp.expected, warp.release_if_full();
  --cta.all.expected, cta.all.release_if_full();
  _longjmp(cta.scheduler, 1);
}

inline void run_cta(int num_threads) {
  cta.fibers.resize(num_threads);
  cta.warps.assign(num_threads / kWarp, Barrier{kWarp});
  cta.values.assign(num_threads / kWarp, std::vector<uint64_t>(2 * kWarp));
  cta.all = Barrier{num_threads};
  for (Fiber& fiber : cta.fibers) fiber.has_started = fiber.is_done = false;
  while (cta.all.expected > 0) {
    cta.has_moved = false;
    for (int idx = 0; idx < num_threads; ++idx) {
      Fiber& fiber = cta.fibers[idx];
      if (fiber.is_done) continue;
      cta.current = idx;
      threadIdx = {static_cast<uint32_t>(idx)};
      if (_setjmp(cta.scheduler) != 0) continue;
      if (fiber.has_started) _longjmp(fiber.place, 1);
      fiber.has_started = true;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.get();
      fiber.start.uc_stack.ss_size = kStackBytes;
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, enter, 0);
      setcontext(&fiber.start);
    }
    if (!cta.has_moved) {
      std::fprintf(stderr, "cuda_on_host: CTA %u: threads wait for each other\n", blockIdx.x);
      std::abort();
    }
  }
}

// kernel<<<num_ctas, num_threads>>>(args...)
template <class Kernel, class... Args>
void launch(uint32_t num_ctas, int num_threads, Kernel kernel, const Args&... args) {
  gridDim = {num_ctas}, blockDim = {static_cast<uint32_t>(num_threads)};
  cta.body = [&] { kernel(args...); };
  for (uint32_t idx = 0; idx < num_ctas; ++idx) {
    blockIdx = {idx};
    run_cta(num_threads);
  }
}

// What the warp's lanes bring; valid until this lane's next call.
template <class T>
const uint64_t* exchange(T value) {
  Barrier& warp = cta.warps[cta.current / kWarp];
  uint64_t* values = cta.values[cta.current / kWarp].data() + warp.generation % 2 * kWarp;
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  values[cta.current % kWarp] = bits;
  wait_at(warp);
  return values;
}
template <class T>
T as(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T, class Combine>
T reduce(T value, Combine combine) {
  const uint64_t* values = exchange(value);
  T result = as<T>(values[0]);
  for (int lane = 1; lane < kWarp; ++lane) result = combine(result, as<T>(values[lane]));
  return result;
}

}  // namespace cuda_on_host

inline void __syncthreads() { cuda_on_host::wait_at(cuda_on_host::cta.all); }
inline void __syncwarp() { cuda_on_host::exchange(0); }
inline uint32_t __ballot_sync(uint32_t, bool value) {
  const uint64_t* values = cuda_on_host::exchange(value);
  uint32_t bits = 0;
  for (int lane = 0; lane < cuda_on_host::kWarp; ++lane) bits |= (values[lane] ? 1u : 0u) << lane;
  return bits;
}
template <class T>
T __shfl_sync(uint32_t, T value, int lane) {
  return cuda_on_host::as<T>(cuda_on_host::exchange(value)[lane % cuda_on_host::kWarp]);
}
template <class T>
T __shfl_xor_sync(uint32_t, T value, int lanes) {
  return cuda_on_host::as<T>(cuda_on_host::exchange(value)[(threadIdx.x % 32) ^ lanes]);
}
template <class T>
T __shfl_up_sync(uint32_t, T value, int distance) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return cuda_on_host::as<T>(
      cuda_on_host::exchange(value)[lane < distance ? lane : lane - distance]);
}
template <class T>
T __reduce_min_sync(uint32_t, T value) {
  return cuda_on_host::reduce(value, [](T x, T y) { return y < x ? y : x; });
}
template <class T>
T __reduce_max_sync(uint32_t, T value) {
  return cuda_on_host::reduce(value, [](T x, T y) { return x < y ? y : x; });
}
template <class T>
T __reduce_add_sync(uint32_t, T value) {
  return cuda_on_host::reduce(value, [](T x, T y) { return x + y; });
}
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}
template <class T>
T atomicMax(T* at, T value) {
  const T before = *at;
  if (before < value) *at = value;
  return before;
}
template <class T>
T atomicMin(T* at, T value) {
  const T before = *at;
  if (value < before) *at = value;
  return before;
}
template <class T>
T atomicOr(T* at, T value) {
  const T before = *at;
  *at |= value;
  return before;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t select) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int idx = 0; idx < 4; ++idx) {
    result |= static_cast<uint32_t>(bytes >> 8 * (select >> 4 * idx & 7) & 0xFF) << 8 * idx;
  }
  return result;
}
inline int __ffs(uint32_t bits) { return bits == 0 ? 0 : __builtin_ctz(bits) + 1; }
inline int __clz(uint32_t bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
template <class T>
T min(T x, T y) {
  return y < x ? y : x;
}
template <class T>
T max(T x, T y) {
  return x < y ? y : x;
}
