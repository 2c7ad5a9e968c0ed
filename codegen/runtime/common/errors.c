/* The text of the last error, one per thread. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "apq_runtime.h"

static _Thread_local char text[2048] = "";

const char *apq_last_error(void) { return text; }

int apq_fail(int code, const char *format, ...) {
  /* Formatted aside, because an argument may be the old text. */
  char fresh[sizeof text];
  va_list args;
  va_start(args, format);
  vsnprintf(fresh, sizeof fresh, format, args);
  va_end(args);
  memcpy(text, fresh, sizeof text);
  return code;
}

int apq_null(const char *what) { return apq_fail(APQ_BAD_INPUT, "%s is NULL", what); }

/* Kernels report through this, the one function of TVM's FFI they call. */
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t num_parts);
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t num_parts) {
  char joined[1536];
  size_t used = 0;
  for (int32_t i = 0; i < num_parts; i++) {
    if (parts[i] == NULL) continue;
    size_t room = sizeof joined - 1 - used, length = strlen(parts[i]);
    if (length > room) length = room;
    memcpy(joined + used, parts[i], length);
    used += length;
  }
  joined[used] = '\0';
  (void)apq_fail(APQ_KERNEL_FAILED, "%s: %s", kind == NULL ? "error" : kind, joined);
}
