// What a UCX status means to kvlink.
#pragma once

#include <ucs/type/status.h>

#include <string_view>

#include "kvlink/error.hpp"

namespace kvlink::transport::ucx {

class Library;

/// The kvlink code for a UCX failure that happened while moving bytes.
[[nodiscard]] Code code_of(ucs_status_t status) noexcept;

/// `operation: what UCX says`, with the code that fits.
[[nodiscard]] Failure failure_of(const Library& library, ucs_status_t status, std::string_view operation);

/// Throws Error for anything but UCS_OK. Control path only.
void check(const Library& library, ucs_status_t status, std::string_view operation);

}  // namespace kvlink::transport::ucx
