/* What a fork does to OpenMP's threads.
 *
 * A fork copies the thread that calls it, and what libgomp notes of its team, but not the team: in the
 * child such a thread would wait for it for ever, whichever module or library had started it. It goes on
 * alone; new threads of the child have teams. Where there was no other thread, there was no team. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "apq_threads.h"

static _Thread_local int threads_at_fork = 0;
static _Thread_local int is_forked = 0;
/* The module was opened in a forked process that had an OpenMP runtime already: nobody can tell whether
 * it had teams before the fork. It is the process's first thread that forked. */
static int first_thread_is_forked = 0;

/* A folder has one link from its parent, one from itself and one from each folder in it. */
int apq_count_threads(void) {
  struct stat tasks;
  return stat("/proc/self/task", &tasks) == 0 ? (int)tasks.st_nlink - 2 : -1;
}

static void before_fork(void) { threads_at_fork = apq_count_threads(); }

static void after_fork(void) {
  is_forked = is_forked || threads_at_fork != 1;
  first_thread_is_forked = 0;
}

int apq_forks_watch(void) { return pthread_atfork(before_fork, NULL, after_fork) == 0; }

/* PF_FORKNOEXEC of linux/sched.h, in the ninth field of /proc/self/stat (proc(5)). */
static int forked_without_exec(void) {
  char text[1024];
  unsigned flags = 0;
  FILE *file = fopen("/proc/self/stat", "re");
  size_t got = file == NULL ? 0 : fread(text, 1, sizeof text - 1, file);
  if (file != NULL) fclose(file);
  text[got] = '\0';
  const char *name_end = strrchr(text, ')');
  if (name_end == NULL || sscanf(name_end + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1) return 0;
  return (flags & 0x40) != 0;
}

void apq_forks_found_openmp(void) { first_thread_is_forked = forked_without_exec(); }

int apq_forks_lost_team(void) {
  return is_forked || (first_thread_is_forked && syscall(SYS_gettid) == getpid());
}
