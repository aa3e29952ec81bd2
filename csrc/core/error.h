// A user's mistake: "<argument>: expected ..., got ...". By that text packing_ops/_runtime/gate.py tells it from other
// errors and raises ValueError, whatever torch made of std::invalid_argument.
#pragma once

#include <sstream>
#include <stdexcept>

namespace packing_ops {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

template <class... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) fail(parts...);
}

}  // namespace packing_ops
