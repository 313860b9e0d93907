#include "kvlink/transport/unique_fd.hpp"

#include <unistd.h>

namespace kvlink::transport {

UniqueFd::~UniqueFd() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace kvlink::transport
