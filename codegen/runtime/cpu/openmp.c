/* Parallel loops on OpenMP's threads, for programs that use OpenMP themselves (APQ_THREADS=openmp).
 *
 * The OpenMP runtime is looked up when the first handle is opened rather than linked, so that one
 * library works where libgomp is installed and where it is not (slim images). It is called by its
 * documented ABI (GCC manual of libgomp, "The libgomp ABI", GOMP_parallel), which is what
 * `#pragma omp parallel num_threads(n)` compiles to. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

#include "apq_threads.h"

/* ---- the OpenMP runtime ---- */

typedef void (*parallel_function)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*index_function)(void);

static parallel_function omp_parallel = NULL;
static index_function omp_thread = NULL, omp_team = NULL;

/* OpenMP in the program itself, if it has any: see find_openmp. */
extern void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags)
    __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));

/* Whether the program was linked with -static or -static-pie: its headers name no dynamic linker. */
static int program_is_static(void) {
  const ElfW(Phdr) *headers = (const ElfW(Phdr) *)getauxval(AT_PHDR);
  unsigned long count = getauxval(AT_PHNUM);
  for (unsigned long i = 0; headers != NULL && i < count; i++) {
    if (headers[i].p_type == PT_INTERP) return 0;
  }
  return headers != NULL;
}

/* dlsym gives a data pointer; POSIX lets it be copied into a function pointer, ISO C has no cast. */
static void look_up(void *library, const char *name, void *function) {
  void *symbol = dlsym(library, name);
  memcpy(function, &symbol, sizeof symbol);
}

static void open_openmp(void) {
  static const char *const names[] = {"libgomp.so.1", "libomp.so.5", "libomp.so", "libiomp5.so"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    void *before = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    void *library = before != NULL ? before : dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) continue;
    if (before != NULL) apq_forks_found_openmp();
    look_up(library, "GOMP_parallel", &omp_parallel);
    look_up(library, "omp_get_thread_num", &omp_thread);
    look_up(library, "omp_get_num_threads", &omp_team);
    if (omp_parallel != NULL && omp_thread != NULL && omp_team != NULL) return;
    omp_parallel = NULL;
    dlclose(library);
  }
}

/* libgomp's waiting threads spin for milliseconds by default. On a machine that others use too, every
 * parallel loop then waits for a thread that the spinning keeps off its CPU: a run of 6 ms took 1300
 * beside six busy processes. libgomp reads its environment once, when it is loaded; the user's own
 * choice stands. */
static const char spin_count[] = "10000"; /* some 100 microseconds: longer than between two loops */

static void find_openmp(void) {
  if (program_is_static()) {
    /* glibc's dlopen gives a static program a libgomp on a C library of its own, in which no thread
     * was ever set up: it crashes where it starts one. So such a program has OpenMP only if it is
     * linked with it (-Wl,-u,GOMP_parallel -lgomp). */
    if (GOMP_parallel == NULL || omp_get_thread_num == NULL || omp_get_num_threads == NULL) return;
    omp_parallel = GOMP_parallel;
    omp_thread = omp_get_thread_num;
    omp_team = omp_get_num_threads;
    return;
  }
  int ours = getenv("GOMP_SPINCOUNT") == NULL && getenv("OMP_WAIT_POLICY") == NULL;
  if (ours) setenv("GOMP_SPINCOUNT", spin_count, 0);
  open_openmp();
  if (ours) unsetenv("GOMP_SPINCOUNT");
}

int apq_openmp_open(void) {
  find_openmp();
  /* Without the handlers nobody would know of a fork. */
  return omp_parallel != NULL && apq_forks_watch();
}

/* ---- how many threads a team has ---- */

static _Thread_local int32_t team_threads = 1;

/* libgomp ends the process where it cannot start a thread (a limit of threads, processes or memory), so
 * that is tried first, with as many as the team is to grow by. */
static _Thread_local int32_t team_has = 1;      /* threads that are there, with this one */
static _Thread_local int32_t team_most = APQ_MAX_THREADS; /* what the last try said */
static _Thread_local int32_t launches_to_try = 0;
enum { LAUNCHES_BETWEEN_TRIES = 1000 };

int32_t apq_openmp_usable(int32_t threads) {
  if (threads <= 1 || apq_forks_lost_team()) return team_threads = 1;
  team_threads = threads;
  return threads < team_most ? threads : team_most;
}

static void *wait_at(void *gate) {
  pthread_mutex_lock(gate);
  pthread_mutex_unlock(gate);
  return NULL;
}

/* How many of `wanted` threads can be there at once, beside all there are. */
static int32_t try_threads(int32_t wanted) {
  pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
  pthread_t started[APQ_MAX_THREADS];
  int32_t count = 0;
  int before = apq_count_threads();
  pthread_mutex_lock(&gate);
  while (count < wanted && pthread_create(&started[count], NULL, wait_at, &gate) == 0) count++;
  pthread_mutex_unlock(&gate);
  for (int32_t i = 0; i < count; i++) pthread_join(started[i], NULL);
  /* The kernel counts a thread against limits for a while after it was joined. */
  for (int i = 0; i < 10000 && apq_count_threads() > before; i++) sched_yield();
  return count;
}

/* The threads of the next team: as wanted, or so many as there can be. */
static int32_t size_team(void) {
  if (team_threads <= team_has) return team_has = team_threads; /* libgomp ends the others */
  if (launches_to_try > 0) {
    launches_to_try--;
    return team_has;
  }
  team_has += try_threads(team_threads - team_has);
  team_most = team_has < team_threads ? team_has : APQ_MAX_THREADS;
  if (team_has < team_threads) launches_to_try = LAUNCHES_BETWEEN_TRIES;
  return team_has;
}

/* ---- one parallel loop ---- */

static void run_share(void *data) {
  const apq_loop *loop = data;
  for (int t = omp_thread(), step = omp_team(); t < loop->count; t += step) loop->task(loop->work, t);
}

void apq_openmp_loop(const apq_loop *loop) {
  int32_t team = size_team();
  if (team > 1) {
    /* The team is always of the same size: libgomp ends threads that a smaller one leaves out. */
    omp_parallel(run_share, (void *)(uintptr_t)loop, (unsigned)team, 0);
    return;
  }
  for (int32_t t = 0; t < loop->count; t++) loop->task(loop->work, t);
}
