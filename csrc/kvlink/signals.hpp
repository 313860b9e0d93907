// Which signals kvlink's threads leave to the application's.
#pragma once

#include <csignal>

namespace kvlink {

/// All but those by which the kernel tells a thread of its own fault: were they blocked, it would end the process
/// without the handler that writes stacks down (faulthandler, a sanitizer, a crash reporter).
[[nodiscard]] inline sigset_t signals_of_others() noexcept {
  sigset_t signals;
  ::sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) ::sigdelset(&signals, fault);
  return signals;
}

}  // namespace kvlink
