// The get and staged lanes over UCX, between two processes: bytes, refusals, and the peer's death.
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check.hpp"
#include "kvlink/transport/chunk_pool.hpp"
#include "kvlink/transport/get_transfer.hpp"
#include "kvlink/transport/staged_receiver.hpp"
#include "kvlink/transport/staged_sender.hpp"
#include "kvlink/transport/ucx/memory_region.hpp"
#include "kvlink/transport/ucx/remote_key.hpp"
#include "scattered.hpp"
#include "two_processes.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::transport;
using test::End;
using test::Link;
using test::Party;
using test::TwoProcesses;
using ucx::FailureMode;

constexpr std::uint32_t kWindow = 4;
constexpr std::uint32_t kChunkBytes = 128U << 10U;
const AttemptId kAttempt{.handoff = {.epoch = {4}, .sequence = 1}, .attempt = 1};
const test::Scattered kShape{.block_bytes = 24U << 10U, .blocks = 400, .moved = 390};
constexpr std::uint64_t kPlanSeed = 5;

/// One way to configure both processes.
struct Way {
  std::string name;
  Party::Settings settings;
  FailureMode mode;
  bool one_sided;
};
const Way kShared{"shared memory", {{"TLS", "^tcp"}, {"RCACHE_ENABLE", "n"}}, FailureMode::none, true};
const Party::Settings kTcp{{"TLS", "tcp"},
                           {"NET_DEVICES", "lo"},
                           {"RCACHE_ENABLE", "n"},
                           {"TCP_TX_SEG_SIZE", "256k"},
                           {"TCP_RX_SEG_SIZE", "1m"}};
const Way kTcpPeer{"tcp, mode peer", kTcp, FailureMode::peer, false};
const Way kTcpNone{"tcp, mode none", kTcp, FailureMode::none, false};
const Way kTcpOpen{"tcp with one-sided access", kTcp, FailureMode::none, true};

enum class Memory { of_this_process, of_a_memfd };

std::byte* allocate(Memory memory, std::uint64_t bytes) {
  int fd = -1;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (memory == Memory::of_a_memfd) {
    fd = ::memfd_create("kvlink-test", MFD_CLOEXEC);
    CHECK(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0);
    flags = MAP_SHARED;
  }
  void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  CHECK(base != MAP_FAILED);
  if (fd >= 0) ::close(fd);
  return static_cast<std::byte*>(base);
}

std::shared_ptr<LocalMemory> filled(Memory memory, std::uint64_t seed) {
  std::byte* const base = allocate(memory, kShape.pool_bytes());
  test::fill(base, kShape.pool_bytes(), seed);
  return std::make_shared<LocalMemory>(std::vector<LocalRegion>{{base, kShape.pool_bytes()}});
}

/// The bytes that the target must have in the end.
std::vector<std::byte> expected_bytes(const plan::Plan& plan) {
  std::vector<std::byte> source(kShape.pool_bytes());
  std::vector<std::byte> target(kShape.pool_bytes());
  test::fill(source.data(), source.size(), 1);
  test::fill(target.data(), target.size(), 2);
  test::copy_by_the_book(plan, source.data(), target.data());
  return target;
}

/// When the target does something to its source, and what.
struct Blow {
  enum class At { never, a_third } at{At::never};
  int signal{0};
};

// ---- get: the source only has its memory registered ----

void get_source(const Link& link, const Way& way, Memory memory) {
  Party party(link, way.settings, way.mode, way.one_sided);
  const auto local = filled(memory, 1);
  const ucx::MemoryRegion region(party.context, local->regions()[0]);
  link.send(party.worker->address());
  link.send(region.packed_key());
  link.send_number(reinterpret_cast<std::uint64_t>(local->regions()[0].base));
  link.send_number(static_cast<std::uint64_t>(::getpid()));
  CHECK(party.run_until([&] { return link.peer_gone(); }, [] { return false; }));
}

struct GetTarget {
  GetTarget(const Link& link, const Way& way) : party(link, way.settings, way.mode, way.one_sided) {
    const auto address = link.receive();
    key = link.receive();
    remote = {.address = link.receive_number(), .bytes = kShape.pool_bytes(), .packed_key = key};
    source_pid = static_cast<pid_t>(link.receive_number());
    endpoint = party.connect(address);
  }
  Party party;
  std::vector<std::byte> key;
  RemoteRegion remote;
  pid_t source_pid{};
  std::shared_ptr<ucx::Endpoint> endpoint;
};

void get_target(const Link& link, const Way& way, Blow blow) {
  GetTarget side(link, way);
  const auto plan = kShape.plan(kPlanSeed);
  const auto local = filled(Memory::of_this_process, 2);
  const auto source = make_get_source(std::move(side.endpoint), std::span(&side.remote, 1));
  // A window of one slice, so that a blow in the middle finds most of the stream not yet asked for.
  const auto transfer = make_get_transfer(plan, source, local, {.window_ops = 8, .window_bytes = 1U << 20U});
  transfer->start();
  bool struck = blow.at == Blow::At::never;
  CHECK(side.party.run_until([&] { return transfer->drained(); },
                             [&] {
                               if (!struck && transfer->moved_bytes() > plan->total_bytes() / 3) {
                                 struck = true;
                                 CHECK(::kill(side.source_pid, blow.signal) == 0);
                                 // The kernel reports the death before the next read could be answered.
                                 while (blow.signal == SIGKILL && !link.peer_gone()) ::usleep(100);
                               }
                               return transfer->advance();
                             }));
  CHECK(struck);
  if (blow.signal == SIGKILL) {
    CHECK(transfer->failure().has_value());
    CHECK(transfer->moved_bytes() < plan->total_bytes() && !transfer->missing().empty());
    return;
  }
  CHECK(!transfer->failure() && transfer->missing().empty());
  CHECK(transfer->moved_bytes() == plan->total_bytes());
  CHECK(std::memcmp(local->regions()[0].base, expected_bytes(*plan).data(), kShape.pool_bytes()) == 0);
}

void get_moves_every_byte_and_no_other() {
  for (const Memory memory : {Memory::of_this_process, Memory::of_a_memfd}) {
    TwoProcesses([memory](const Link& link) { get_source(link, kShared, memory); },
                 [](const Link& link) { get_target(link, kShared, {}); })
        .expect(End::by_itself, End::by_itself);
  }
}

void get_from_a_killed_source_fails_and_drains() {
  TwoProcesses([](const Link& link) { get_source(link, kShared, Memory::of_this_process); },
               [](const Link& link) { get_target(link, kShared, {Blow::At::a_third, SIGKILL}); })
      .expect(End::killed, End::by_itself);
}

void get_that_ucx_would_emulate_is_refused() {
  TwoProcesses([](const Link& link) { get_source(link, kTcpOpen, Memory::of_this_process); },
               [](const Link& link) {
                 GetTarget side(link, kTcpOpen);
                 CHECK(test::code_thrown_by([&] {
                         (void)make_get_source(side.endpoint, std::span(&side.remote, 1));
                       }) == Code::lane_unavailable);
               })
      .expect(End::by_itself, End::by_itself);
}

void a_cancelled_get_drains_and_writes_nothing_later() {
  TwoProcesses([](const Link& link) { get_source(link, kShared, Memory::of_this_process); },
               [](const Link& link) {
                 GetTarget side(link, kShared);
                 const auto local = filled(Memory::of_this_process, 2);
                 const auto source = make_get_source(side.endpoint, std::span(&side.remote, 1));
                 const auto transfer = make_get_transfer(kShape.plan(kPlanSeed), source, local, {.window_ops = 8});
                 transfer->start();
                 transfer->cancel();
                 CHECK(side.party.run_until([&] { return transfer->drained(); }, [&] { return transfer->advance(); }));
                 CHECK(!transfer->failure() && !transfer->missing().empty());
                 const std::vector<std::byte> before(local->regions()[0].base,
                                                     local->regions()[0].base + kShape.pool_bytes());
                 for (int turn = 0; turn < 1000; ++turn) {
                   side.party.worker->progress();
                   transfer->advance();
                 }
                 CHECK(std::memcmp(before.data(), local->regions()[0].base, before.size()) == 0);
               })
      .expect(End::by_itself, End::by_itself);
}

// ---- staged: the source gathers and sends, the target gives credit over the link ----

enum class SourceEnd { when_told, on_lost_target };

void staged_source(const Link& link, const Way& way, SourceEnd end) {
  Party party(link, way.settings, way.mode, way.one_sided);
  const auto local = filled(Memory::of_this_process, 1);
  link.send(party.worker->address());
  link.send_number(static_cast<std::uint64_t>(::getpid()));
  auto endpoint = party.connect(link.receive());
  const auto pool = std::make_shared<ChunkPool>(kChunkBytes, kWindow);
  auto sender = std::make_unique<StagedSender>(kShape.plan(kPlanSeed), local, endpoint, kAttempt, pool, kWindow,
                                               party.copy_threads, party.waker);
  sender->start();
  bool lost = false;
  CHECK(party.run_until([&] { return sender->drained(); },
                        [&] {
                          if (!lost && link.peer_gone()) {  // what the engine does when the control socket ends
                            lost = true;
                            sender->cancel();
                          } else if (link.readable() && !lost) {
                            sender->credit(static_cast<std::uint32_t>(link.receive_number()));
                            return true;
                          }
                          return sender->advance();
                        }));
  CHECK((end == SourceEnd::on_lost_target) != sender->finished());
  CHECK(pool->lent() <= kWindow);
  if (sender->finished()) {
    link.send_number(0);  // the target may go
    link.discard_until_end();
  }
  endpoint.reset();
  sender.reset();
  CHECK(party.worker.use_count() == 1);
  party.worker.reset();
  CHECK(pool->lent() == 0);
}

struct StagedTarget {
  StagedTarget(const Link& link, const Way& way) : party(link, way.settings, way.mode, way.one_sided) {
    const auto address = link.receive();
    source_pid = static_cast<pid_t>(link.receive_number());
    receiver = StagedReceiver::create(plan, local, kWindow, party.copy_threads, party.waker);
    party.router->attach(kAttempt, receiver);
    receiver->start();
    link.send(party.worker->address());
  }
  bool advance() {
    const bool any = receiver->advance();
    if (const auto credits = receiver->take_credits(); credits != 0) party.link.send_number(credits);
    return any;
  }
  Party party;
  std::shared_ptr<const plan::Plan> plan = kShape.plan(kPlanSeed);
  std::shared_ptr<LocalMemory> local = filled(Memory::of_this_process, 2);
  pid_t source_pid{};
  std::shared_ptr<StagedReceiver> receiver;
};

void staged_target(const Link& link, const Way& way) {
  StagedTarget side(link, way);
  CHECK(side.party.run_until([&] { return side.receiver->drained(); }, [&] { return side.advance(); }));
  CHECK(!side.receiver->failure() && side.receiver->missing().empty());
  CHECK(side.receiver->moved_bytes() == side.plan->total_bytes());
  CHECK(std::memcmp(side.local->regions()[0].base, expected_bytes(*side.plan).data(), kShape.pool_bytes()) == 0);
  CHECK(side.party.router->dropped() == 0);
  side.party.router->detach(kAttempt);
  CHECK(side.party.run_until([&] { return link.readable(); }, [] { return false; }));
  CHECK(link.receive_number() == 0);
}

/// A third of the way, `strike` is called, and the transfer is cancelled as soon as the link ends.
void staged_target_that_strikes(const Link& link, const Way& way, const std::function<void(pid_t)>& strike) {
  StagedTarget side(link, way);
  bool struck = false;
  CHECK(side.party.run_until([&] { return side.receiver->drained(); },
                             [&] {
                               if (!struck && side.receiver->moved_bytes() > side.plan->total_bytes() / 3) {
                                 struck = true;
                                 strike(side.source_pid);
                               }
                               if (link.peer_gone()) side.receiver->cancel();
                               return !link.peer_gone() && side.advance();
                             }));
  CHECK(struck && !side.receiver->missing().empty());
  CHECK(side.receiver->moved_bytes() < side.plan->total_bytes());
}

void staged_moves_every_byte_and_no_other() {
  for (const Way& way : {kShared, kTcpPeer, kTcpNone}) {
    std::printf("  over %s\n", way.name.c_str());
    TwoProcesses([&](const Link& link) { staged_source(link, way, SourceEnd::when_told); },
                 [&](const Link& link) { staged_target(link, way); })
        .expect(End::by_itself, End::by_itself);
  }
}

void staged_from_a_killed_source_drains() {
  for (const Way& way : {kShared, kTcpPeer, kTcpNone}) {
    std::printf("  over %s\n", way.name.c_str());
    TwoProcesses([&](const Link& link) { staged_source(link, way, SourceEnd::when_told); },
                 [&](const Link& link) {
                   staged_target_that_strikes(link, way, [](pid_t source) { CHECK(::kill(source, SIGKILL) == 0); });
                 })
        .expect(End::killed, End::by_itself);
  }
}

void staged_to_a_killed_target_drains_and_gives_its_chunks_back() {
  for (const Way& way : {kShared, kTcpPeer, kTcpNone}) {
    std::printf("  over %s\n", way.name.c_str());
    TwoProcesses(
        [&](const Link& link) { staged_source(link, way, SourceEnd::on_lost_target); },
        [&](const Link& link) { staged_target_that_strikes(link, way, [](pid_t) { ::kill(::getpid(), SIGKILL); }); })
        .expect(End::by_itself, End::killed);
  }
}

// ---- hostile peers ----

void a_rendezvous_message_is_refused() {
  TwoProcesses(
      [](const Link& link) {
        Party party(link, kShared.settings, kShared.mode, true);
        const auto endpoint = party.connect(link.receive());
        const auto header = ChunkHeader{.attempt = kAttempt, .stream_begin = 0, .length = 4U << 20U}.encode();
        const std::vector<std::byte> payload(4U << 20U);
        const auto message = std::make_shared<ucx::PendingRequests>();
        ucp_request_param_t param{};
        param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = UCP_AM_SEND_FLAG_RNDV;
        param.cb.send = &ucx::PendingRequests::on_complete;
        param.user_data = message.get();
        message->started(*party.worker,
                         party.worker->call().am_send_nbx(endpoint->raw(), 0, header.data(), header.size(),
                                                          payload.data(), payload.size(), &param));
        CHECK(party.run_until([&] { return link.peer_gone(); }, [] { return false; }));
      },
      [](const Link& link) {
        Party party(link, kShared.settings, kShared.mode, true);
        link.send(party.worker->address());
        CHECK(party.run_until([&] { return party.router->dropped() == 1; }, [] { return false; }));
      })
      .expect(End::by_itself, End::by_itself);
}

/// UCX over TCP checks no keys. That a get is answered by a handler of UCP is all that keeps a connected peer from
/// reading anywhere, and that handler is not there. (Writes are handled a layer below: see UcxSettings.one_sided.)
void memory_cannot_be_read_over_tcp_where_one_sided_access_is_off() {
  TwoProcesses(
      [](const Link& link) {
        Party party(link, kTcpOpen.settings, kTcpOpen.mode, kTcpOpen.one_sided);
        const auto endpoint = party.connect(link.receive());
        const std::uint64_t secret = link.receive_number();
        std::vector<std::byte> own(4096);
        const ucx::MemoryRegion region(party.context, {own.data(), own.size()});
        const ucx::RemoteKey key(endpoint, region.packed_key());
        const auto attempt = std::make_shared<ucx::PendingRequests>();
        ucp_request_param_t param{};
        param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
        param.cb.send = &ucx::PendingRequests::on_complete;
        param.user_data = attempt.get();
        attempt->started(*party.worker, party.worker->call().get_nbx(endpoint->raw(), own.data(), own.size(), secret,
                                                                     key.raw(), &param));
        // A message behind the request tells the target that it has been dealt with.
        const auto header = ChunkHeader{.attempt = kAttempt, .stream_begin = 0, .length = 8}.encode();
        const auto message = std::make_shared<ucx::PendingRequests>();
        endpoint->start_message(*message, header, std::span(own).first(8));
        CHECK(party.run_until([&] { return link.peer_gone(); }, [] { return false; }));
        CHECK(own == std::vector<std::byte>(4096));
      },
      [](const Link& link) {
        Party party(link, kTcpNone.settings, kTcpNone.mode, kTcpNone.one_sided);
        const std::vector<std::byte> secret(4096, std::byte{0x11});
        link.send(party.worker->address());
        link.send_number(reinterpret_cast<std::uint64_t>(secret.data()));
        CHECK(party.run_until([&] { return party.router->dropped() == 1; }, [] { return false; }));
        // An answer would go out with the next turns.
        for (int turn = 0; turn < 1000; ++turn) party.worker->progress();
      })
      .expect(End::by_itself, End::by_itself);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);  // the libucp.so.0 to test with
  test::library_path = argv[1];
  return test::run(
      {{"get moves every byte and no other", get_moves_every_byte_and_no_other},
       {"get from a killed source fails and drains", get_from_a_killed_source_fails_and_drains},
       {"get that UCX would emulate is refused", get_that_ucx_would_emulate_is_refused},
       {"a cancelled get drains and writes nothing later", a_cancelled_get_drains_and_writes_nothing_later},
       {"staged moves every byte and no other", staged_moves_every_byte_and_no_other},
       {"staged from a killed source drains", staged_from_a_killed_source_drains},
       {"staged to a killed target drains and gives its chunks back",
        staged_to_a_killed_target_drains_and_gives_its_chunks_back},
       {"a rendezvous message is refused", a_rendezvous_message_is_refused},
       {"memory cannot be read over TCP where one-sided access is off",
        memory_cannot_be_read_over_tcp_where_one_sided_access_is_off}});
}
