// The staged lane that goes wrong by script, for tests: chunks are held, lost, doubled and shuffled at the receiver.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvlink/transport/fault_script.hpp"
#include "kvlink/transport/staged_receiver.hpp"

namespace kvlink::transport {

class FaultyReceiver final : public StagedReceiver {
 public:
  /// `total_bytes` are those of the plan.
  FaultyReceiver(std::shared_ptr<StagedReceiver> inner, std::uint64_t total_bytes, std::shared_ptr<Faults> faults);

  void on_chunk(const ChunkHeader& header, ReceivedData data) noexcept override;
  void start() noexcept override { inner_->start(); }
  bool advance() noexcept override;
  void cancel() noexcept override;
  [[nodiscard]] bool drained() const noexcept override;
  [[nodiscard]] std::uint64_t moved_bytes() const noexcept override { return inner_->moved_bytes(); }
  [[nodiscard]] std::optional<Failure> failure() const override;
  [[nodiscard]] std::vector<StreamRange> missing() const override { return inner_->missing(); }
  [[nodiscard]] std::uint64_t post_ns() const noexcept override { return inner_->post_ns(); }
  [[nodiscard]] std::uint32_t take_credits() noexcept override { return inner_->take_credits(); }

 private:
  struct Held {
    std::int64_t due_ns{};
    ChunkHeader header;
    ReceivedData data;
  };
  void hold(const ChunkHeader& header, ReceivedData data);
  void fail(Failure cause) noexcept;

  std::shared_ptr<StagedReceiver> inner_;
  const std::uint64_t total_bytes_;
  std::shared_ptr<Faults> faults_;
  const FaultDraws draws_;
  std::vector<Held> held_;
  std::uint64_t chunks_{0};
  std::uint64_t taken_bytes_{0};
  std::int64_t last_due_ns_{0};
  std::int64_t stop_due_ns_{0};  // not 0: like RC, and cancelled or failed; chunks still land until then
  std::optional<Failure> failure_;
  bool cancelled_{false};
};

}  // namespace kvlink::transport
