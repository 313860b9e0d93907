// The copy threads run every piece once, in turn between jobs, and let go of everything when they end.
#include <dirent.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "kvlink/transport/copy_threads.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::transport;

constexpr auto kLimit = std::chrono::seconds(20);

/// `pieces` pieces, each counted; calls `on_piece` from the thread that runs it.
class CountingJob final : public CopyJob {
 public:
  CountingJob(std::uint64_t pieces, std::function<void(std::uint64_t)> on_piece)
      : runs_(pieces), on_piece_(std::move(on_piece)) {}

  std::optional<std::uint64_t> claim() noexcept override {
    if (next_ == runs_.size()) return std::nullopt;
    return next_++;
  }
  void run(std::uint64_t piece) noexcept override {
    runs_[piece].fetch_add(1);
    on_piece_(piece);
    if (done_.fetch_add(1) + 1 == runs_.size()) finished_.release();
  }

  void wait() { CHECK(finished_.try_acquire_for(kLimit)); }
  [[nodiscard]] std::uint64_t done() const { return done_.load(); }
  [[nodiscard]] bool each_ran_once() const {
    for (const auto& count : runs_) {
      if (count.load() != 1) return false;
    }
    return true;
  }

 private:
  std::uint64_t next_{0};
  std::vector<std::atomic<int>> runs_;
  std::atomic<std::uint64_t> done_{0};
  std::binary_semaphore finished_{0};
  std::function<void(std::uint64_t)> on_piece_;
};

void every_piece_runs_once() {
  CopyThreads threads(3);
  std::vector<std::shared_ptr<CountingJob>> jobs;
  for (int i = 0; i < 20; ++i) {
    jobs.push_back(std::make_shared<CountingJob>(200, [](std::uint64_t) {}));
    CHECK(threads.submit(jobs.back()));
  }
  for (const auto& job : jobs) {
    job->wait();
    CHECK(job->each_ran_once());
  }
}

void pieces_of_one_job_run_at_the_same_time() {
  CopyThreads threads(2);
  std::atomic<int> inside{0};
  auto meeting = std::make_shared<CountingJob>(2, [&](std::uint64_t) {  // on one thread this would never end
    inside.fetch_add(1);
    const auto until = std::chrono::steady_clock::now() + kLimit;
    while (inside.load() < 2) {
      CHECK(std::chrono::steady_clock::now() < until);
      std::this_thread::yield();
    }
  });
  CHECK(threads.submit(meeting));
  meeting->wait();
}

void a_small_job_passes_a_large_one() {
  CopyThreads threads(1);
  std::binary_semaphore started{0};
  std::binary_semaphore go_on{0};
  auto large = std::make_shared<CountingJob>(1000, [&](std::uint64_t piece) {
    if (piece != 0) return;
    started.release();
    CHECK(go_on.try_acquire_for(kLimit));
  });
  CHECK(threads.submit(large));
  CHECK(started.try_acquire_for(kLimit));
  std::uint64_t large_pieces_before{1000};
  auto small = std::make_shared<CountingJob>(1, [&](std::uint64_t) { large_pieces_before = large->done(); });
  CHECK(threads.submit(small));
  go_on.release();
  small->wait();
  CHECK(large_pieces_before <= 2);
  large->wait();
}

void a_full_queue_refuses() {
  auto threads = std::make_unique<CopyThreads>(1);
  std::binary_semaphore started{0};
  std::binary_semaphore go_on{0};
  CHECK(threads->submit_once([&] {
    started.release();
    CHECK(go_on.try_acquire_for(kLimit));
  }));
  CHECK(started.try_acquire_for(kLimit));
  auto dropped = std::make_shared<std::atomic<int>>(0);
  std::size_t queued = 1;  // the running one stands there until its thread comes back
  while (threads->submit_once([dropped] { dropped->fetch_add(1); })) CHECK(++queued <= CopyThreads::kMaxJobs);
  CHECK(queued == CopyThreads::kMaxJobs);
  CHECK(!threads->submit(std::make_shared<CountingJob>(1, [](std::uint64_t) {})));
  go_on.release();
  threads.reset();
  CHECK(dropped.use_count() == 1);  // run or not, no call is kept
}

void unclaimed_pieces_never_run() {
  std::atomic<int> ran{0};
  std::shared_ptr<CountingJob> job;
  {
    CopyThreads threads(1);
    std::binary_semaphore started{0};
    job = std::make_shared<CountingJob>(1'000'000, [&](std::uint64_t) {
      if (ran.fetch_add(1) == 0) started.release();
    });
    CHECK(threads.submit(job));
    CHECK(started.try_acquire_for(kLimit));
  }
  CHECK(job.use_count() == 1);
  CHECK(ran.load() < 1'000'000);
}

/// One line of /proc/self/task/TID/status for each thread called `name`.
std::vector<std::string> status_lines(const std::string& name, const std::string& key) {
  std::vector<std::string> lines;
  DIR* tasks = ::opendir("/proc/self/task");
  CHECK(tasks != nullptr);
  while (const dirent* entry = ::readdir(tasks)) {
    std::ifstream status(std::string("/proc/self/task/") + entry->d_name + "/status");
    bool named = false;
    for (std::string line; std::getline(status, line);) {
      if (line == "Name:\t" + name) named = true;
      if (named && line.rfind(key, 0) == 0) lines.push_back(line);
    }
  }
  ::closedir(tasks);
  return lines;
}

void threads_have_a_name_and_block_signals() {
  CopyThreads threads(2);
  auto job = std::make_shared<CountingJob>(100, [](std::uint64_t) {});
  CHECK(threads.submit(job));
  job->wait();
  std::vector<std::string> masks;
  const auto until = std::chrono::steady_clock::now() + kLimit;
  while (masks.size() < 2 && std::chrono::steady_clock::now() < until) masks = status_lines("kvlink-copy", "SigBlk:");
  CHECK(masks.size() == 2);
  // All that can be blocked (not SIGKILL, SIGSTOP, and two of the C library) but those of a thread's own faults.
  for (const auto& mask : masks) CHECK(mask.find("fffffffe3ffbfa07") != std::string::npos);
  CHECK(status_lines("kvlink-copy", "SigBlk:").size() == 2);
}

void no_threads_is_refused() {
  CHECK(test::code_thrown_by([] { CopyThreads threads(0); }) == Code::invalid_argument);
}

}  // namespace

int main() {
  return test::run({{"every piece runs once", every_piece_runs_once},
                    {"pieces of one job run at the same time", pieces_of_one_job_run_at_the_same_time},
                    {"a small job passes a large one", a_small_job_passes_a_large_one},
                    {"a full queue refuses", a_full_queue_refuses},
                    {"unclaimed pieces never run", unclaimed_pieces_never_run},
                    {"threads have a name and block signals", threads_have_a_name_and_block_signals},
                    {"no threads is refused", no_threads_is_refused}});
}
