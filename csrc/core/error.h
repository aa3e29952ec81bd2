// A user's mistake: thrown as std::invalid_argument, which Python receives as ValueError with this text alone.
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
