// A function of a library that this process has loaded. Looking its name up keeps the library out of our link line.
#pragma once

#include <dlfcn.h>

namespace packing_ops {

// Null if the library is not loaded or has no such function.
template <class Function>
Function loaded_function(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function>(handle ? dlsym(handle, name) : nullptr);
}

}  // namespace packing_ops
