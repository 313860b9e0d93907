// The mapped and vectored lanes: every byte arrives, or the transfer says which did not and why.
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <semaphore>
#include <vector>

#include "check.hpp"
#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/transport/copy_kernels.hpp"
#include "kvlink/transport/copy_staging.hpp"
#include "kvlink/transport/mapped_transfer.hpp"
#include "kvlink/transport/pool.hpp"
#include "kvlink/transport/sliced_transfer.hpp"
#include "kvlink/transport/vectored_transfer.hpp"
#include "scattered.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::transport;

constexpr auto kLimit = std::chrono::seconds(20);
constexpr std::uint64_t kSlice = SliceJob::kSliceBytes;

std::byte* anonymous(std::uint64_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(base != MAP_FAILED);
  return static_cast<std::byte*>(base);
}

/// What the progress thread does, asleep between the bells.
void drive(Transfer& transfer, const Waker& waker) {
  while (!transfer.drained()) {
    pollfd bell{.fd = waker.fd(), .events = POLLIN, .revents = 0};
    CHECK(::poll(&bell, 1, 20'000) == 1);
    waker.clear();
    transfer.advance();
  }
}

/// Source bytes in this process's pool and in a child's private memory, and a target that is mostly 0x5a.
class Copying {
 public:
  explicit Copying(const test::Scattered& scattered, unsigned threads = 2)
      : pool_(Pool::create(scattered.pool_bytes())),
        target_(anonymous(scattered.pool_bytes())),
        bytes_(scattered.pool_bytes()),
        plan_(scattered.plan(11)),
        local_(std::make_shared<LocalMemory>(std::vector<LocalRegion>{{target_, bytes_}})),
        threads_(threads) {
    test::fill(pool_->base(), bytes_, 3);
    std::memset(target_, 0x5a, bytes_);
    mapped_ = std::make_shared<MappedSource>();
    auto& regions = const_cast<MappedSource&>(*mapped_).regions;
    regions.push_back(std::make_shared<const Mapping>(pool_->open_read_only(), bytes_));
  }
  Copying(const Copying&) = delete;
  Copying& operator=(const Copying&) = delete;
  ~Copying() { ::munmap(target_, bytes_); }

  std::shared_ptr<Transfer> mapped() { return make_mapped_transfer(plan_, mapped_, local_, threads_, waker_); }
  std::shared_ptr<Transfer> vectored(const std::shared_ptr<const VectoredSource>& source) {
    return make_vectored_transfer(plan_, source, local_, threads_, waker_);
  }

  void check_target() const {
    std::vector<std::byte> expected(bytes_, std::byte{0x5a});
    test::copy_by_the_book(*plan_, pool_->base(), expected.data());
    CHECK(std::memcmp(target_, expected.data(), bytes_) == 0);
  }
  /// What is not missing must be right.
  void check_what_arrived(const Transfer& transfer) const {
    std::uint64_t begin = 0;
    auto missing = transfer.missing();
    missing.push_back({plan_->total_bytes(), plan_->total_bytes()});
    for (const StreamRange& gap : missing) {
      plan_->visit(begin, gap.begin, [this](const plan::StridedCopy& copy) {
        CHECK(copy.inner == 1 && copy.outer == 1);
        CHECK(std::memcmp(target_ + copy.target_offset, pool_->base() + copy.source_offset, copy.run_bytes) == 0);
      });
      begin = gap.end;
    }
  }
  void check_whole(const Transfer& transfer) const {
    CHECK(!transfer.failure());
    CHECK(transfer.moved_bytes() == plan_->total_bytes());
    CHECK(transfer.missing().empty());
    check_target();
  }

  std::shared_ptr<Pool> pool_;
  std::byte* target_;
  std::uint64_t bytes_;
  std::shared_ptr<const plan::Plan> plan_;
  std::shared_ptr<const LocalMemory> local_;
  std::shared_ptr<const MappedSource> mapped_;
  Waker waker_;
  CopyThreads threads_;
};

/// A process that holds a private copy of `bytes` at `base` and waits to be killed.
class Child {
 public:
  Child(const std::byte* bytes, std::uint64_t size, std::uint64_t unmap_from) {
    base_ = anonymous(size);
    int ready[2];
    CHECK(::pipe(ready) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      std::memcpy(base_, bytes, size);
      if (unmap_from < size) ::munmap(base_ + unmap_from, size - unmap_from);
      if (::write(ready[1], "r", 1) != 1) ::_exit(1);
      while (true) ::pause();
    }
    char byte{};
    CHECK(::read(ready[0], &byte, 1) == 1);
    ::close(ready[0]);
    ::close(ready[1]);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    kill();
    ::waitpid(pid_, nullptr, 0);
  }

  void kill() const { ::kill(pid_, SIGKILL); }
  [[nodiscard]] std::shared_ptr<const VectoredSource> open() const {
    return open_vectored_source(pid_, {reinterpret_cast<std::uint64_t>(base_)});
  }
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  std::byte* base_{};
  pid_t pid_{};
};

void mapped_moves_every_byte_and_no_other() {
  for (const test::Scattered& scattered :
       {test::Scattered{4096, 3000, 2000}, test::Scattered{100'000, 40, 30}, test::Scattered{48, 500, 499},
        test::Scattered{3'000'001, 4, 3}, test::Scattered{1, 1, 1}}) {
    Copying copying(scattered);
    const auto counted = copied_bytes();
    auto transfer = copying.mapped();
    CHECK(!transfer->drained());
    transfer->start();
    drive(*transfer, copying.waker_);
    copying.check_whole(*transfer);
    CHECK(copied_bytes() - counted == copying.plan_->total_bytes());  // once: no hidden repack
  }
}

void vectored_moves_every_byte_and_no_other() {
  for (const test::Scattered& scattered :
       {test::Scattered{4096, 3000, 2000}, test::Scattered{100, 5000, 4000}, test::Scattered{3'000'001, 4, 3}}) {
    Copying copying(scattered);
    const Child child(copying.pool_->base(), copying.bytes_, copying.bytes_);
    auto transfer = copying.vectored(child.open());
    transfer->start();
    drive(*transfer, copying.waker_);
    copying.check_whole(*transfer);
  }
}

void an_empty_plan_is_drained_at_once() {
  Copying copying({.block_bytes = 64, .blocks = 4, .moved = 0});
  auto transfer = copying.mapped();
  transfer->start();
  CHECK(transfer->drained());
  copying.check_whole(*transfer);
}

void staging_goes_through_a_buffer_at_any_cut() {
  Copying copying({.block_bytes = 1000, .blocks = 300, .moved = 200});
  const LocalMemory source({{copying.pool_->base(), copying.bytes_}});
  const std::uint64_t total = copying.plan_->total_bytes();
  std::vector<std::byte> chunk(77'777);
  for (std::uint64_t at = 0; at < total; at += chunk.size()) {
    const std::uint64_t end = std::min(total, at + chunk.size());
    gather(*copying.plan_, at, end, source, chunk.data());
    scatter(*copying.plan_, at, end, chunk.data(), *copying.local_);
  }
  copying.check_target();
}

void a_dead_process_is_a_lost_peer() {
  Copying copying({.block_bytes = 4096, .blocks = 3000, .moved = 2000});
  const Child child(copying.pool_->base(), copying.bytes_, copying.bytes_);
  const auto source = child.open();
  child.kill();
  pollfd dead{.fd = source->pidfd.value(), .events = POLLIN, .revents = 0};
  CHECK(::poll(&dead, 1, 20'000) == 1);
  auto transfer = copying.vectored(source);
  transfer->start();
  drive(*transfer, copying.waker_);
  CHECK(transfer->failure() && transfer->failure()->code == Code::peer_lost);
  CHECK(transfer->moved_bytes() == 0);
  const auto missing = transfer->missing();
  CHECK(missing.size() == 1 && missing[0].begin == 0 && missing[0].end == copying.plan_->total_bytes());
  CHECK(test::code_thrown_by([&] { (void)child.open(); }) == Code::peer_lost);
}

void a_kill_in_the_middle_loses_only_what_did_not_arrive() {
  Copying copying({.block_bytes = 4096, .blocks = 30'000, .moved = 25'000}, 1);
  for (int attempt = 0; attempt < 20; ++attempt) {
    const Child child(copying.pool_->base(), copying.bytes_, copying.bytes_);
    auto transfer = copying.vectored(child.open());
    transfer->start();
    while (transfer->moved_bytes() < 2 * kSlice) continue;
    child.kill();
    drive(*transfer, copying.waker_);
    std::uint64_t missing = 0;
    for (const StreamRange& range : transfer->missing()) missing += range.end - range.begin;
    CHECK(missing + transfer->moved_bytes() == copying.plan_->total_bytes());
    if (missing == 0) continue;  // on a busy machine all may be over before the kill
    CHECK(transfer->failure() && transfer->failure()->code == Code::peer_lost);
    copying.check_what_arrived(*transfer);
    return;
  }
  std::fprintf(stderr, "no kill came in the middle\n");
  std::_Exit(1);
}

void memory_that_the_peer_unmapped_is_an_error_of_the_transfer() {
  Copying copying({.block_bytes = 65'536, .blocks = 640, .moved = 640}, 1);
  const Child child(copying.pool_->base(), copying.bytes_, copying.bytes_ - 65'536);
  auto transfer = copying.vectored(child.open());
  transfer->start();
  drive(*transfer, copying.waker_);
  CHECK(transfer->failure() && transfer->failure()->code == Code::transport_failed);
  CHECK(!transfer->missing().empty());
  copying.check_what_arrived(*transfer);
}

void reading_what_is_not_permitted_is_an_unavailable_lane() {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::getuid() == 0 && ::setuid(65'534) != 0) ::_exit(2);
    const auto code = test::code_thrown_by([] { (void)open_vectored_source(1, {4096}); });
    ::_exit(code == Code::lane_unavailable ? 0 : 1);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(test::code_thrown_by([] { (void)open_vectored_source(0x3fffffff, {}); }) == Code::peer_lost);
}

/// Waits in slice `wait_at` for `go_on`, fails in slice `fail_at`, and counts what runs.
class ScriptedCopier final : public SliceCopier {
 public:
  struct Script {
    std::uint64_t slices{};
    std::uint64_t wait_at{~std::uint64_t{0}};
    std::uint64_t fail_at{~std::uint64_t{0}};
    std::binary_semaphore reached{0};
    std::binary_semaphore go_on{0};
    std::atomic<int> copied{0};
  };
  explicit ScriptedCopier(Script& script) : script_(script) {}

  std::uint64_t total_bytes() const noexcept override { return script_.slices * kSlice - 1; }
  std::optional<SliceFailure> copy(StreamRange range) const noexcept override {
    const std::uint64_t slice = range.begin / kSlice;
    CHECK(range.end == std::min((slice + 1) * kSlice, total_bytes()));
    if (slice == script_.wait_at) {
      script_.reached.release();
      CHECK(script_.go_on.try_acquire_for(kLimit));
    }
    if (slice == script_.fail_at) return SliceFailure{Code::transport_failed, "scripted", 5};
    script_.copied.fetch_add(1);
    return std::nullopt;
  }

 private:
  Script& script_;
};

void cancelling_waits_for_the_running_slice_and_no_other() {
  ScriptedCopier::Script script{.slices = 100, .wait_at = 3};
  const Waker waker;
  CopyThreads threads(1);
  SlicedTransfer transfer(std::make_unique<ScriptedCopier>(script), threads, waker);
  transfer.start();
  CHECK(script.reached.try_acquire_for(kLimit));
  transfer.cancel();
  transfer.cancel();
  CHECK(!transfer.drained());  // slice 3 is still writing
  script.go_on.release();
  drive(transfer, waker);
  CHECK(script.copied.load() == 4);
  CHECK(transfer.failure() && transfer.failure()->code == Code::cancelled);
  CHECK(transfer.moved_bytes() == 4 * kSlice);
  const auto missing = transfer.missing();
  CHECK(missing.size() == 1 && missing[0].begin == 4 * kSlice && missing[0].end == 100 * kSlice - 1);
}

void a_failed_slice_stops_the_rest_and_names_the_first_cause() {
  ScriptedCopier::Script script{.slices = 50, .fail_at = 7};
  const Waker waker;
  CopyThreads threads(1);
  SlicedTransfer transfer(std::make_unique<ScriptedCopier>(script), threads, waker);
  transfer.start();
  drive(transfer, waker);
  CHECK(script.copied.load() == 7);
  const auto failure = transfer.failure();
  CHECK(failure && failure->code == Code::transport_failed && failure->message.rfind("scripted: ", 0) == 0);
  CHECK(transfer.missing().size() == 1 && transfer.missing()[0].begin == 7 * kSlice);
}

void cancelled_before_the_start_it_is_drained() {
  ScriptedCopier::Script script{.slices = 5};
  const Waker waker;
  CopyThreads threads(1);
  SlicedTransfer transfer(std::make_unique<ScriptedCopier>(script), threads, waker);
  transfer.cancel();
  CHECK(transfer.drained());
  transfer.start();
  CHECK(transfer.drained());
  CHECK(script.copied.load() == 0);
  CHECK(transfer.failure()->code == Code::cancelled);
}

void a_cancel_after_the_end_changes_nothing() {
  Copying copying({.block_bytes = 4096, .blocks = 300, .moved = 200});
  auto transfer = copying.mapped();
  transfer->start();
  drive(*transfer, copying.waker_);
  transfer->cancel();
  copying.check_whole(*transfer);
}

void a_transfer_may_go_while_a_slice_runs() {
  ScriptedCopier::Script script{.slices = 4, .wait_at = 0};
  const Waker waker;
  CopyThreads threads(1);
  auto transfer = std::make_unique<SlicedTransfer>(std::make_unique<ScriptedCopier>(script), threads, waker);
  transfer->start();
  CHECK(script.reached.try_acquire_for(kLimit));
  transfer.reset();
  script.go_on.release();
  pollfd bell{.fd = waker.fd(), .events = POLLIN, .revents = 0};
  CHECK(::poll(&bell, 1, 20'000) == 1);
  CHECK(script.copied.load() == 1);
}

void regions_of_another_size_are_refused() {
  const test::Scattered scattered{.block_bytes = 4096, .blocks = 8, .moved = 8};
  Copying copying(scattered);
  const auto plan = test::Scattered{.block_bytes = 4096, .blocks = 9, .moved = 9}.plan(1);
  CHECK(test::code_thrown_by([&] {
          (void)make_mapped_transfer(plan, copying.mapped_, copying.local_, copying.threads_, copying.waker_);
        }) == Code::invalid_argument);
  const auto none = std::make_shared<MappedSource>();
  CHECK(test::code_thrown_by([&] {
          (void)make_mapped_transfer(copying.plan_, none, copying.local_, copying.threads_, copying.waker_);
        }) == Code::invalid_argument);
  const auto nowhere = std::make_shared<VectoredSource>();
  CHECK(test::code_thrown_by([&] {
          (void)make_vectored_transfer(copying.plan_, nowhere, copying.local_, copying.threads_, copying.waker_);
        }) == Code::invalid_argument);
}

}  // namespace

int main() {
  return test::run(
      {{"mapped moves every byte and no other", mapped_moves_every_byte_and_no_other},
       {"vectored moves every byte and no other", vectored_moves_every_byte_and_no_other},
       {"an empty plan is drained at once", an_empty_plan_is_drained_at_once},
       {"staging goes through a buffer at any cut", staging_goes_through_a_buffer_at_any_cut},
       {"a dead process is a lost peer", a_dead_process_is_a_lost_peer},
       {"a kill in the middle loses only what did not arrive", a_kill_in_the_middle_loses_only_what_did_not_arrive},
       {"memory that the peer unmapped is an error", memory_that_the_peer_unmapped_is_an_error_of_the_transfer},
       {"reading what is not permitted", reading_what_is_not_permitted_is_an_unavailable_lane},
       {"cancelling waits for the running slice", cancelling_waits_for_the_running_slice_and_no_other},
       {"a failed slice stops the rest", a_failed_slice_stops_the_rest_and_names_the_first_cause},
       {"cancelled before the start it is drained", cancelled_before_the_start_it_is_drained},
       {"a cancel after the end changes nothing", a_cancel_after_the_end_changes_nothing},
       {"a transfer may go while a slice runs", a_transfer_may_go_while_a_slice_runs},
       {"regions of another size are refused", regions_of_another_size_are_refused}});
}
