/* Which CPUs helpers of a team may be on: not that of the thread that runs.
 *
 * A kernel wakes a thread near its waker, and a guest's takes a CPU that halted for one that its host has taken
 * away (vcpu_is_preempted): helpers that had slept for some milliseconds woke on the CPU of the thread that runs,
 * though another was idle, and stayed there. Two threads took as long as one. */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "apq_threads.h"

enum { MOST_CPUS = 8192 };

int32_t apq_thread_number(void) { return (int32_t)syscall(SYS_gettid); }

int32_t apq_this_cpu(void) { return sched_getcpu(); }

int apq_keep_off(int32_t cpu, int32_t thread) {
  cpu_set_t *allowed = CPU_ALLOC(MOST_CPUS);
  size_t bytes = CPU_ALLOC_SIZE(MOST_CPUS);
  int kept = 0;
  if (allowed == NULL) return 0;
  CPU_ZERO_S(bytes, allowed);
  if (sched_getaffinity(0, bytes, allowed) == 0) {
    CPU_CLR_S((size_t)cpu, bytes, allowed);
    kept = CPU_COUNT_S(bytes, allowed) > 0 && sched_setaffinity(thread, bytes, allowed) == 0;
  }
  CPU_FREE(allowed);
  return kept;
}
