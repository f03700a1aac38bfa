/* Settings come from the environment; see README.md. */
#include "device.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

int emu_tracing;
static FILE *log_file;

long emu_setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

size_t emu_setting_bytes(const char *name, size_t otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

void emu_log(const char *format, ...) {
  if (!log_file) {
    const char *path = getenv("EMULATED_LOG");
    log_file = path && *path ? fopen(path, "a") : stderr;
    if (!log_file) log_file = stderr;
    setvbuf(log_file, NULL, _IOLBF, 0);
  }
  va_list arguments;
  va_start(arguments, format);
  fputs("emulated: ", log_file);
  vfprintf(log_file, format, arguments);
  va_end(arguments);
}

__attribute__((constructor)) static void start(void) { emu_tracing = (int)emu_setting("EMULATED_TRACE", 0); }
