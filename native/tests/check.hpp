// A test is a function that CHECKs; main runs them and returns the number of failures.
#pragma once

#include <cstdio>
#include <exception>

namespace check {

inline int failures = 0;

inline void report(bool ok, const char *what, const char *file, int line) {
    if (!ok) {
        std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
        ++failures;
    }
}

// Whether the call throws an Error.
template <typename Error, typename Call> bool throws(Call call) {
    try {
        call();
    } catch (const Error &) {
        return true;
    } catch (const std::exception &) {
        return false;
    }
    return false;
}

} // namespace check

#define CHECK(condition) check::report((condition), #condition, __FILE__, __LINE__)
