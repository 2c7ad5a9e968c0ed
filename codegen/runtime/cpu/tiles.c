/* AMX's tiles, which Linux gives to a process that asks. */
#define _GNU_SOURCE
#include "apq_context.h"

#if defined(__x86_64__)

#include <sys/syscall.h>
#include <unistd.h>

/* From 5.16 on: Documentation/arch/x86/xstate.rst. All threads of the process have them then, and what it
 * starts by fork. Without, their first instruction is a SIGILL. */
int apq_ask_for_tiles(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#else

int apq_ask_for_tiles(void) { return 0; }

#endif
