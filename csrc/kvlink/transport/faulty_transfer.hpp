// A lane that goes wrong by script, for tests: each block pair is a piece, and a transfer of the real lane moves it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "kvlink/transport/fault_script.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/transfer.hpp"

namespace kvlink::plan {
class Plan;
}

namespace kvlink::transport {

/// Bytes are counted as arrived by whole pieces.
class FaultyTransfer final : public Transfer {
 public:
  /// A transfer of the real lane over a part of the plan. May throw Error.
  using Lane = std::function<std::shared_ptr<Transfer>(std::shared_ptr<const plan::Plan>)>;

  FaultyTransfer(std::shared_ptr<const plan::Plan> plan, Lane lane, std::shared_ptr<const LocalMemory> target,
                 std::shared_ptr<Faults> faults);
  ~FaultyTransfer() override;

  void start() noexcept override;
  bool advance() noexcept override;
  void cancel() noexcept override;
  [[nodiscard]] bool drained() const noexcept override;
  [[nodiscard]] std::uint64_t moved_bytes() const noexcept override { return moved_bytes_; }
  [[nodiscard]] std::optional<Failure> failure() const override { return failure_; }
  [[nodiscard]] std::vector<StreamRange> missing() const override;
  [[nodiscard]] std::uint64_t post_ns() const noexcept override { return post_ns_; }

 private:
  struct Piece;

  void schedule();
  void post(Piece& piece, std::int64_t now);
  /// The lane has a failure from now on, or from when a lane like RC tells it.
  void fail_later(std::int64_t now, Failure cause);
  void fail(Failure cause) noexcept;
  void corrupt(const Piece& piece) noexcept;
  bool advance_piece(Piece& piece, std::int64_t now);
  void set_alarm() noexcept;

  std::shared_ptr<const plan::Plan> plan_;
  Lane lane_;
  std::shared_ptr<const LocalMemory> target_;
  std::shared_ptr<Faults> faults_;
  const FaultDraws draws_;
  std::vector<std::unique_ptr<Piece>> pieces_;  // in the order in which they are posted
  std::uint64_t posted_bytes_{0};
  std::uint64_t moved_bytes_{0};
  std::uint64_t post_ns_{0};
  std::int64_t error_due_ns_{0};  // not 0: the failure below is told then
  std::optional<Failure> error_;
  std::optional<Failure> failure_;
  bool started_{false};
  bool stopped_{false};    // nothing is posted any more
  bool cancelled_{false};  // by the owner, whatever a lane like RC makes of it
};

}  // namespace kvlink::transport
