// From scratch memory to the target's blocks: the last step of a part whose elements arrive in another dtype.
#pragma once

#include <memory>

#include "kvlink/plan/conversion.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/sliced_transfer.hpp"

namespace kvlink::transport {

/// Executes the `plan` of a conversion on the copy threads. Used like a lane's transfer, which it is not: its
/// bytes are those of the converted elements.
///
/// `memory` has the target's regions, and scratch memory behind them. `threads` and `waker` outlive the transfer and
/// every slice of it. Throws Error(invalid_argument) where `memory` is other memory, std::bad_alloc.
[[nodiscard]] std::shared_ptr<Transfer> make_convert_transfer(std::shared_ptr<const plan::Conversion> conversion,
                                                              std::shared_ptr<const plan::Plan> plan,
                                                              std::shared_ptr<const LocalMemory> memory,
                                                              CopyThreads& threads, const Waker& waker);

/// The same at once, on the calling thread; for tests.
void convert_now(const plan::Conversion& conversion, const plan::Plan& plan, const LocalMemory& memory);

}  // namespace kvlink::transport
