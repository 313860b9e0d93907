#include "kvlink/transport/pool.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "kvlink/error.hpp"

#ifndef F_SEAL_FUTURE_WRITE  // Linux 5.1; older C libraries do not name it
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace kvlink::transport {
namespace {

[[noreturn]] void throw_system(Code code, const char* operation, std::uint64_t bytes, const char* advice) {
  const int error = errno;
  throw Error(code, "allocate a pool of " + std::to_string(bytes) + " bytes: " + operation + ": " +
                        std::strerror(error) + advice);
}

/// A pool that this machine can never fill is refused now: touching its pages would end in a signal, not in an error.
void check_size(std::uint64_t bytes) {
  if (bytes == 0) throw Error(Code::invalid_argument, "allocate a pool: it must have at least one byte");
  struct sysinfo machine{};
  if (::sysinfo(&machine) != 0) return;
  const std::uint64_t memory = (std::uint64_t{machine.totalram} + machine.totalswap) * machine.mem_unit;
  if (bytes > memory) {
    throw Error(Code::out_of_memory, "allocate a pool of " + std::to_string(bytes) + " bytes: this machine has " +
                                         std::to_string(memory) + " bytes of memory and swap");
  }
}

UniqueFd make_memfd(std::uint64_t bytes) {
  check_size(bytes);
  UniqueFd fd(::memfd_create("kvlink", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    throw_system(Code::out_of_memory, "memfd_create", bytes,
                 errno == EMFILE ? "; raise the limit of open files (ulimit -n)" : "");
  }
  // Linux makes it rwx for everybody. Whoever is given a read-only descriptor must not open it again for more.
  if (::fchmod(fd.value(), S_IRUSR | S_IWUSR) != 0) throw_system(Code::out_of_memory, "fchmod", bytes, "");
  if (::ftruncate(fd.value(), static_cast<off_t>(bytes)) != 0) {
    throw_system(Code::out_of_memory, "ftruncate", bytes, "");
  }
  return fd;
}

std::byte* map_writable(int fd, std::uint64_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw_system(Code::out_of_memory, "mmap", bytes, "");
  return static_cast<std::byte*>(base);
}

/// Only after this process has its own writable mapping: the seal refuses every later one, here and in peers.
void seal(int fd, std::uint64_t bytes) {
  constexpr int kSize = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (::fcntl(fd, F_ADD_SEALS, kSize | F_SEAL_FUTURE_WRITE) == 0) return;
  // A kernel before 5.1: the read-only descriptor alone must then keep honest peers from writing.
  if (errno == EINVAL && ::fcntl(fd, F_ADD_SEALS, kSize) == 0) return;
  throw_system(Code::out_of_memory, "sealing the memfd", bytes, "");
}

struct Registry {
  std::mutex mutex;
  std::map<std::uintptr_t, std::weak_ptr<Pool>> by_base;
};

/// Never destroyed: a pool held by a thread or by the interpreter may die after static destructors ran.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

std::uintptr_t address_of(const std::byte* base) noexcept {
  return reinterpret_cast<std::uintptr_t>(base);
}

}  // namespace

MappedBytes::~MappedBytes() {
  ::munmap(base_, bytes_);
}

std::shared_ptr<Pool> Pool::create(std::uint64_t bytes) {
  UniqueFd fd = make_memfd(bytes);
  std::byte* base = map_writable(fd.value(), bytes);
  std::shared_ptr<Pool> pool;
  try {
    pool = std::make_shared<Pool>(std::move(fd), base, bytes);
  } catch (...) {
    ::munmap(base, bytes);
    throw;
  }
  seal(pool->fd(), bytes);
  const std::lock_guard lock(registry().mutex);
  registry().by_base.insert_or_assign(address_of(base), pool);
  return pool;
}

std::shared_ptr<Pool> Pool::find(std::uintptr_t address) {
  std::shared_ptr<Pool> pool;  // released after the lock: its destructor takes the lock too
  const std::lock_guard lock(registry().mutex);
  auto after = registry().by_base.upper_bound(address);
  if (after == registry().by_base.begin()) return nullptr;
  pool = std::prev(after)->second.lock();
  if (!pool || address - address_of(pool->base()) >= pool->bytes()) return nullptr;
  return pool;
}

Pool::Pool(UniqueFd fd, std::byte* base, std::uint64_t bytes) noexcept : fd_(std::move(fd)), mapping_(base, bytes) {}

Pool::~Pool() {
  // Erased before the unmapping, or a new pool at the same address could lose its entry.
  const std::lock_guard lock(registry().mutex);
  registry().by_base.erase(address_of(base()));
}

UniqueFd Pool::open_read_only() const {
  const std::string path = "/proc/self/fd/" + std::to_string(fd());
  UniqueFd read_only(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (read_only) return read_only;
  if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
    throw_system(Code::out_of_memory, "opening a read-only descriptor", bytes(), "");
  }
  // Without /proc the same open file goes out, which is as good if the memfd itself is sealed against writing.
  const int seals = ::fcntl(fd(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_FUTURE_WRITE) == 0) {
    throw Error(Code::lane_unavailable,
                "share a pool: /proc is not mounted and this kernel cannot seal a memfd against writing; "
                "a peer could not be kept from writing to it");
  }
  UniqueFd duplicate(::fcntl(fd(), F_DUPFD_CLOEXEC, 0));
  if (!duplicate) throw_system(Code::out_of_memory, "duplicating the descriptor", bytes(), "");
  return duplicate;
}

}  // namespace kvlink::transport
