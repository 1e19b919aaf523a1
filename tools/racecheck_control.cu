// SPDX-License-Identifier: Apache-2.0
// Does racecheck understand what the kernels synchronise with? A producer warp hands 32 words to a consumer warp
// through a shared buffer, guarded by a "full" and an "empty" mbarrier as in ops/cuda. argv[1] says who arrives:
//   all      every lane that wrote or read: right
//   elected  one lane, after __syncwarp: right too, and what the kernels do
//   none     nobody, nobody waits: a race, which must be reported
// Prints "ok" if the sum is right. tools/sanitize.py runs it beside the kernels.
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

constexpr int kRounds = 16;
enum Mode : int { kAll, kElected, kNone };

__device__ uint32_t smem_addr(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ void init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(barrier)), "r"(arrivals));
}
__device__ void arrive(uint64_t* barrier, int mode) {
  if (mode == kNone) return;
  if (mode == kElected) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
  }
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(barrier)) : "memory");
}
__device__ void wait(uint64_t* barrier, uint32_t parity, int mode) {
  if (mode == kNone) return;
  uint32_t is_done = 0;
  while (is_done == 0) {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(is_done)
        : "r"(smem_addr(barrier)), "r"(parity)
        : "memory");
  }
}

__global__ void hand_over(int mode, int* sum) {
  __shared__ uint64_t full, empty;
  __shared__ int buffer[32];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init(&full, mode == kAll ? 32 : 1);
    init(&empty, mode == kAll ? 32 : 1);
  }
  __syncthreads();
  int total = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x < 32) {
      wait(&empty, (round & 1) ^ 1, mode);  // passes at once in round 0
      buffer[lane] = round * 32 + lane;
      arrive(&full, mode);
    } else {
      wait(&full, round & 1, mode);
      total += buffer[31 - lane];
      arrive(&empty, mode);
    }
  }
  if (threadIdx.x >= 32) atomicAdd(sum, total);
}

}  // namespace

int main(int argc, char** argv) {
  const char* name = argc > 1 ? argv[1] : "all";
  const int mode = !std::strcmp(name, "all")       ? kAll
                   : !std::strcmp(name, "elected") ? kElected
                                                   : kNone;
  int *sum = nullptr, result = 0;
  cudaMalloc(&sum, sizeof(int));
  cudaMemset(sum, 0, sizeof(int));
  hand_over<<<1, 64>>>(mode, sum);
  const cudaError_t status = cudaMemcpy(&result, sum, sizeof(int), cudaMemcpyDeviceToHost);
  const int count = kRounds * 32;
  const bool is_right = result == count * (count - 1) / 2;
  std::printf("%s: %s\n", name,
              status != cudaSuccess ? cudaGetErrorString(status)
              : is_right            ? "ok"
                                    : "wrong sum");
  return status == cudaSuccess && (is_right || mode == kNone) ? 0 : 1;
}
