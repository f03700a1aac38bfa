/* The driver's functions by their names, each in its newest version: libcudart and torch ask for them so. */
#define _GNU_SOURCE
#include "device.h"
#include <dlfcn.h>
#include <stdio.h>

void *emu_driver_function(const char *name) {
  static void *library;
  char versioned[256];
  void *function = NULL;
  if (!library) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  for (int version = 4; version >= 2 && !function; version--) {
    snprintf(versioned, sizeof versioned, "%s_v%d", name, version);
    function = dlsym(library, versioned);
  }
  if (!function) function = dlsym(library, name);
  TRACE("driver's %s%s\n", name, function ? "" : ": there is none");
  return function;
}
