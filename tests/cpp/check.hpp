// A test program is a list of named checks and a main() that runs them: enough for what Python cannot reach.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kvlink/error.hpp"

namespace kvlink::test {

/// A fuzzer keeps the input only of a program that aborts; a test needs no core file.
[[noreturn]] inline void give_up() {
#ifdef KVLINK_FUZZ
  std::abort();
#else
  std::_Exit(1);
#endif
}

/// Ends the program at the first thing that is not as it should be.
#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::fflush(stderr);                                                               \
      ::kvlink::test::give_up();                                                         \
    }                                                                                    \
  } while (false)

/// The code that `call` throws; ends the program if it throws nothing.
inline Code code_thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.what()[0] != '\0');
    return error.code();
  }
  std::fprintf(stderr, "an Error was expected\n");
  give_up();
}

using Tests = std::vector<std::pair<std::string, std::function<void()>>>;

/// Runs all of them in order, naming each.
inline int run(const Tests& tests) {
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name.c_str());
    std::fflush(stdout);
    test();
  }
  return 0;
}

}  // namespace kvlink::test
