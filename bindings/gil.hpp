// Waiting without the interpreter's lock.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

/// Gives the GIL up until the end of the scope.
///
/// An interpreter before 3.14 ends a thread that asks for the GIL during finalization, with pthread_exit. That unwinds
/// the thread's C++ frames as an exception does, through destructors that are noexcept, and aborts the process. Here
/// such a thread sleeps until the process is gone, as it does from 3.14 on.
class GilReleased {
 public:
  GilReleased() : thread_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

  ~GilReleased() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {  // Only pthread_exit gets here: C code throws nothing. It must not leave this block.
      while (true) pause();
    }
  }

 private:
  PyThreadState* thread_;
};
