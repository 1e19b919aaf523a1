// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace fm3::cpu {
namespace {

std::atomic<int32_t> requested_num_threads{0};

int32_t num_usable_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return std::max(1u, std::thread::hardware_concurrency());
}

// One batch of items; lives on the caller's stack while its threads run.
struct Job {
  const std::function<void(int64_t, int32_t)>* body;
  int64_t num_items;
  std::fenv_t float_env;
  std::atomic<int64_t> next_item{0};

  void work(int32_t thread_idx) {
    for (int64_t item_idx; (item_idx = next_item.fetch_add(1)) < num_items;) {
      (*body)(item_idx, thread_idx);
    }
  }
};

class Pool {
 public:
  std::mutex& busy() { return busy_; }

  // The caller holds busy().
  void run(Job* job, int32_t num_workers) {
    try {
      while (static_cast<int32_t>(workers_.size()) < num_workers) {
        const int32_t worker_idx = static_cast<int32_t>(workers_.size());
        workers_.emplace_back([this, worker_idx] { serve(worker_idx); });
        workers_.back().detach();  // workers wait for work until the process ends
      }
    } catch (const std::system_error&) {
      // The system refuses another thread: the work is done, to the same bits, by those there are.
      num_workers = static_cast<int32_t>(workers_.size());
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      num_invited_ = num_workers;
      num_running_ = num_workers;
      ++job_id_;
    }
    wake_.notify_all();
    job->work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return num_running_ == 0; });
  }

 private:
  void serve(int32_t worker_idx) {
    int64_t seen_job_id = 0;
    for (;;) {
      Job* job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return job_id_ != seen_job_id; });
        seen_job_id = job_id_;
        if (worker_idx >= num_invited_) continue;
        job = job_;
      }
      std::fesetenv(&job->float_env);
      job->work(worker_idx + 1);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (--num_running_ == 0) done_.notify_one();
      }
    }
  }

  std::mutex busy_;   // held by the one caller that uses the workers
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
  int32_t num_invited_ = 0, num_running_ = 0;
  int64_t job_id_ = 0;
};

// NOTE: never destroyed. Its threads may still wait on it while the process exits, and a forked
// child, which has none of those threads, gets a fresh one (the old one is left behind).
std::atomic<Pool*> shared_pool{nullptr};

Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    shared_pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { shared_pool = new Pool; });
  });
  return *shared_pool;
}

}  // namespace

void set_num_threads(int32_t num_threads) { requested_num_threads = std::max(0, num_threads); }

int32_t num_threads() {
  const int32_t requested = requested_num_threads;
  return requested > 0 ? requested : num_usable_cores();
}

void parallel_for(int32_t num_threads, int64_t num_items,
                  const std::function<void(int64_t, int32_t)>& body) {
  Job job;
  job.body = &body;
  job.num_items = num_items;
  std::fegetenv(&job.float_env);
  const int64_t num_workers = std::min<int64_t>(num_threads, num_items) - 1;
  if (num_workers > 0) {
    Pool& workers = pool();
    std::unique_lock<std::mutex> lock(workers.busy(), std::try_to_lock);
    if (lock.owns_lock()) {
      workers.run(&job, static_cast<int32_t>(num_workers));
      return;
    }
  }
  job.work(0);
}

}  // namespace fm3::cpu
