// Pools cannot be harmed by who maps them, and mapping one cannot harm this process.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "kvlink/transport/mapping.hpp"
#include "kvlink/transport/pool.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::transport;

constexpr std::uint64_t kBytes = 3 * 4096 + 100;

std::uintptr_t address(const std::byte* at) {
  return reinterpret_cast<std::uintptr_t>(at);
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += ::fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

void a_pool_is_zeroed_and_shared_with_its_mapping() {
  auto pool = Pool::create(kBytes);
  CHECK(pool->bytes() == kBytes);
  for (std::uint64_t i = 0; i < kBytes; ++i) CHECK(pool->base()[i] == std::byte{0});
  const Mapping mapping(pool->open_read_only(), kBytes);
  pool->base()[kBytes - 1] = std::byte{42};
  CHECK(mapping.base()[kBytes - 1] == std::byte{42});
  pool.reset();  // as by the death of its owner
  CHECK(mapping.base()[kBytes - 1] == std::byte{42});
}

void nothing_writes_or_resizes_it_through_a_descriptor() {
  const auto pool = Pool::create(kBytes);
  const UniqueFd read_only = pool->open_read_only();
  const std::string again = "/proc/self/fd/" + std::to_string(read_only.value());
  const UniqueFd reopened(::open(again.c_str(), O_RDWR | O_CLOEXEC));
  for (const int fd : {read_only.value(), reopened.value(), pool->fd()}) {
    CHECK(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    CHECK(::write(fd, "x", 1) == -1);
    CHECK(::ftruncate(fd, 0) == -1);
    CHECK(::ftruncate(fd, 1 << 20) == -1);
    void* readable = ::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(readable != MAP_FAILED);
    CHECK(::mprotect(readable, kBytes, PROT_READ | PROT_WRITE) == -1);
    ::munmap(readable, kBytes);
  }
  pool->base()[0] = std::byte{1};  // the owner still can
}

void a_pool_is_found_by_every_address_in_it() {
  const auto first = Pool::create(kBytes);
  auto second = Pool::create(4096);
  CHECK(Pool::find(address(first->base())) == first);
  CHECK(Pool::find(address(first->base()) + kBytes - 1) == first);
  CHECK(Pool::find(address(first->base()) + kBytes) != first);
  CHECK(Pool::find(address(second->base())) == second);
  CHECK(Pool::find(0) == nullptr);
  CHECK(Pool::find(~std::uintptr_t{0}) == nullptr);
  const auto gone = address(second->base());
  second.reset();
  CHECK(Pool::find(gone) == nullptr);
}

void pools_that_are_gone_hide_no_later_one() {
  constexpr std::uint64_t kPage = 4096;
  constexpr std::size_t kCount = 64;
  std::vector<std::shared_ptr<Pool>> small;
  for (std::size_t i = 0; i < kCount; ++i) small.push_back(Pool::create(kPage));
  small.clear();
  const auto large = Pool::create(kCount * kPage);  // most likely where the small ones were
  for (std::size_t i = 0; i < kCount; ++i) CHECK(Pool::find(address(large->base()) + i * kPage) == large);
}

void sizes_that_cannot_be_are_refused() {
  CHECK(test::code_thrown_by([] { (void)Pool::create(0); }) == Code::invalid_argument);
  CHECK(test::code_thrown_by([] { (void)Pool::create(~std::uint64_t{0}); }) == Code::out_of_memory);
  CHECK(test::code_thrown_by([] { (void)Pool::create(std::uint64_t{1} << 50); }) == Code::out_of_memory);
}

UniqueFd memfd(unsigned flags, std::uint64_t bytes, int seals) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | flags));
  CHECK(fd && ::ftruncate(fd.value(), static_cast<off_t>(bytes)) == 0);
  if (seals != 0) CHECK(::fcntl(fd.value(), F_ADD_SEALS, seals) == 0);
  return fd;
}

Code code_of_mapping(UniqueFd fd, std::uint64_t bytes) {
  return test::code_thrown_by([&] { const Mapping mapping(std::move(fd), bytes); });
}

void hostile_descriptors_are_refused_and_closed() {
  const int before = open_descriptors();
  CHECK(code_of_mapping(memfd(MFD_ALLOW_SEALING, kBytes, 0), kBytes) == Code::protocol_error);
  CHECK(code_of_mapping(memfd(MFD_ALLOW_SEALING, kBytes, F_SEAL_GROW), kBytes) == Code::protocol_error);
  CHECK(code_of_mapping(memfd(0, kBytes, 0), kBytes) == Code::protocol_error);
  CHECK(code_of_mapping(memfd(MFD_ALLOW_SEALING, kBytes - 1, F_SEAL_SHRINK), kBytes) == Code::protocol_error);
  CHECK(code_of_mapping(UniqueFd(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC)), 4096) == Code::protocol_error);
  CHECK(code_of_mapping(UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)), 4096) == Code::protocol_error);
  CHECK(code_of_mapping(UniqueFd(), 4096) == Code::protocol_error);
  CHECK(code_of_mapping(memfd(MFD_ALLOW_SEALING, kBytes, F_SEAL_SHRINK), 0) == Code::protocol_error);
  CHECK(code_of_mapping(memfd(MFD_ALLOW_SEALING, kBytes, F_SEAL_SHRINK), ~std::uint64_t{0}) == Code::protocol_error);
  const Mapping fine(memfd(MFD_ALLOW_SEALING, kBytes, F_SEAL_SHRINK), kBytes);
  CHECK(open_descriptors() == before);  // a mapping needs none, and every refused one is closed
}

void running_out_of_descriptors_is_a_typed_error() {
  const auto pool = Pool::create(kBytes);
  rlimit before{};
  CHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{0, before.rlim_max};
  CHECK(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  CHECK(test::code_thrown_by([] { (void)Pool::create(4096); }) == Code::out_of_memory);
  CHECK(test::code_thrown_by([&] { (void)pool->open_read_only(); }) == Code::out_of_memory);
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(Pool::create(4096) != nullptr);
}

void running_out_of_address_space_is_a_typed_error() {
  rlimit before{};
  CHECK(::getrlimit(RLIMIT_AS, &before) == 0);
  const int descriptors = open_descriptors();
  const rlimit tight{std::uint64_t{256} << 20, before.rlim_max};
  CHECK(::setrlimit(RLIMIT_AS, &tight) == 0);
  CHECK(test::code_thrown_by([] { (void)Pool::create(std::uint64_t{1} << 30); }) == Code::out_of_memory);
  CHECK(::setrlimit(RLIMIT_AS, &before) == 0);
  CHECK(open_descriptors() == descriptors);
}

}  // namespace

int main() {
  return test::run(
      {{"a pool is zeroed and shared with its mapping", a_pool_is_zeroed_and_shared_with_its_mapping},
       {"nothing writes or resizes it through a descriptor", nothing_writes_or_resizes_it_through_a_descriptor},
       {"a pool is found by every address in it", a_pool_is_found_by_every_address_in_it},
       {"pools that are gone hide no later one", pools_that_are_gone_hide_no_later_one},
       {"sizes that cannot be are refused", sizes_that_cannot_be_are_refused},
       {"hostile descriptors are refused and closed", hostile_descriptors_are_refused_and_closed},
       {"running out of descriptors is a typed error", running_out_of_descriptors_is_a_typed_error},
       {"running out of address space is a typed error", running_out_of_address_space_is_a_typed_error}});
}
