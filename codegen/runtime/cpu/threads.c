/* Parallel loops of kernels on OpenMP threads, and how many of them.
 *
 * The OpenMP runtime is looked up when the first handle is opened rather than linked, so that one
 * library works where libgomp is installed and, on one thread, where it is not (slim images). It is
 * called by its documented ABI (GCC manual of libgomp, "The libgomp ABI", GOMP_parallel), which is
 * what `#pragma omp parallel num_threads(n)` compiles to. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include "apq_runtime.h"

/* ---- the OpenMP runtime ---- */

typedef void (*parallel_function)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*index_function)(void);

static parallel_function omp_parallel = NULL;
static index_function omp_thread = NULL, omp_team = NULL;
static pthread_once_t omp_once = PTHREAD_ONCE_INIT;

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

/* ---- forks ---- */

/* A fork copies the thread that calls it, and what libgomp notes of its team, but not the team: in the
 * child such a thread would wait for it for ever, whichever module or library had started it. It goes on
 * alone; new threads of the child have teams. Where there was no other thread, there was no team. */
static _Thread_local int threads_at_fork = 0;
static _Thread_local int is_forked = 0;
/* The module was opened in a forked process that had an OpenMP runtime already: nobody can tell whether
 * it had teams before the fork. It is the process's first thread that forked. */
static int first_thread_is_forked = 0;

/* A folder has one link from its parent, one from itself and one from each folder in it. */
static int count_threads(void) {
  struct stat tasks;
  return stat("/proc/self/task", &tasks) == 0 ? (int)tasks.st_nlink - 2 : -1;
}

static void before_fork(void) { threads_at_fork = count_threads(); }

static void after_fork(void) {
  is_forked = is_forked || threads_at_fork != 1;
  first_thread_is_forked = 0;
}

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

static int has_lost_team(void) {
  return is_forked || (first_thread_is_forked && syscall(SYS_gettid) == getpid());
}

/* ---- finding the OpenMP runtime ---- */

static void open_openmp(void) {
  static const char *const names[] = {"libgomp.so.1", "libomp.so.5", "libomp.so", "libiomp5.so"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    void *before = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    void *library = before != NULL ? before : dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) continue;
    first_thread_is_forked = before != NULL && forked_without_exec();
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
     * was ever set up: it crashes where it starts one. So such a program has threads only if it is
     * linked with OpenMP (-Wl,-u,GOMP_parallel -lgomp). */
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

static void set_up(void) {
  find_openmp();
  /* Without the handlers nobody would know of a fork. */
  if (omp_parallel != NULL && pthread_atfork(before_fork, NULL, after_fork) != 0) omp_parallel = NULL;
}

int apq_has_openmp(void) {
  pthread_once(&omp_once, set_up);
  return omp_parallel != NULL;
}

/* ---- one parallel loop ---- */

typedef struct {
  void *sync_handle;
  int32_t num_task;
} group_env; /* TVMParallelGroupEnv */

typedef int (*task_function)(int task, group_env *env, void *data);

typedef struct {
  task_function task;
  group_env env;
  void *data;
  atomic_int failed; /* 0, or the first error code */
  pthread_mutex_t lock;
  char text[1024]; /* the first error, which its thread would otherwise keep to itself */
} launch;

static _Thread_local int32_t tasks_wanted = 1;
static _Thread_local int32_t team_threads = 1;

/* libgomp ends the process where it cannot start a thread (a limit of threads, processes or memory), so
 * that is tried first, with as many as the team is to grow by. */
static _Thread_local int32_t team_has = 1;      /* threads that are there, with this one */
static _Thread_local int32_t team_most = APQ_MAX_THREADS; /* what the last try said */
static _Thread_local int32_t launches_to_try = 0;
enum { LAUNCHES_BETWEEN_TRIES = 1000 };

int32_t apq_usable_threads(int32_t threads) {
  if (threads <= 1 || !apq_has_openmp() || has_lost_team()) return team_threads = 1;
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
  int before = count_threads();
  pthread_mutex_lock(&gate);
  while (count < wanted && pthread_create(&started[count], NULL, wait_at, &gate) == 0) count++;
  pthread_mutex_unlock(&gate);
  for (int32_t i = 0; i < count; i++) pthread_join(started[i], NULL);
  /* The kernel counts a thread against limits for a while after it was joined. */
  for (int i = 0; i < 10000 && count_threads() > before; i++) sched_yield();
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

void apq_set_tasks(int32_t tasks) { tasks_wanted = tasks; }

static void run_share(void *data) {
  launch *l = data;
  for (int t = omp_thread(), step = omp_team(); t < l->env.num_task; t += step) {
    int rc = l->task(t, &l->env, l->data);
    if (rc == 0) continue;
    pthread_mutex_lock(&l->lock);
    if (atomic_load(&l->failed) == 0) {
      snprintf(l->text, sizeof l->text, "%s", apq_last_error());
      atomic_store(&l->failed, rc);
    }
    pthread_mutex_unlock(&l->lock);
  }
}

static int parallel_launch(task_function task, void *data, int num_task) {
  int32_t tasks = num_task > 0 ? num_task : tasks_wanted;
  launch l = {.task = task, .env = {NULL, tasks}, .data = data};
  int32_t team = tasks_wanted <= 1 || tasks == 1 ? 1 : size_team();
  if (team == 1) {
    for (int t = 0; t < tasks; t++) {
      int rc = task(t, &l.env, data);
      if (rc != 0) return rc;
    }
    return 0;
  }
  atomic_init(&l.failed, 0);
  pthread_mutex_init(&l.lock, NULL);
  /* The team is always of the same size: libgomp ends threads that a smaller one leaves out. */
  omp_parallel(run_share, &l, (unsigned)team, 0);
  pthread_mutex_destroy(&l.lock);
  int rc = atomic_load(&l.failed);
  return rc == 0 ? 0 : apq_fail(rc, "%s", l.text);
}

typedef struct {
  int (*task)(int number, void *data);
  void *data;
} side_by_side;

static int one_of_them(int number, group_env *env, void *data) {
  const side_by_side *all = data;
  (void)env;
  return all->task(number, all->data);
}

int apq_side_by_side(int (*task)(int number, void *data), void *data, int32_t tasks) {
  side_by_side all = {task, data};
  tasks_wanted = tasks;
  return parallel_launch(one_of_them, &all, tasks);
}

/* Kernels call through this pointer, which their object file holds as a weak null. */
extern int (*__TVMBackendParallelLaunch)(task_function, void *, int);
int (*__TVMBackendParallelLaunch)(task_function, void *, int) = parallel_launch;

/* ---- how many threads ---- */

/* Reads a small file into `text`; 0 if it is not there. */
static int read_text(const char *path, char *text, size_t size) {
  FILE *file = fopen(path, "re");
  if (file == NULL) return 0;
  size_t got = fread(text, 1, size - 1, file);
  fclose(file);
  text[got] = '\0';
  return got > 0;
}

/* The lowest allowed CPU of a list such as "0,64" or "4-5"; -1 if none is. */
static int first_allowed(const char *list, const cpu_set_t *allowed, size_t set_bytes) {
  while (*list >= '0' && *list <= '9') {
    char *end;
    long low = strtol(list, &end, 10), high = low;
    if (*end == '-') high = strtol(end + 1, &end, 10);
    for (long cpu = low; cpu <= high; cpu++) {
      if (CPU_ISSET_S((size_t)cpu, set_bytes, allowed)) return (int)cpu;
    }
    list = *end == ',' ? end + 1 : end;
  }
  return -1;
}

/* Cores among the CPUs this process may run on: a CPU counts if no lower allowed one shares its core. */
static int32_t allowed_cores(void) {
  enum { MAX_CPUS = 8192 };
  cpu_set_t *allowed = CPU_ALLOC(MAX_CPUS);
  size_t set_bytes = CPU_ALLOC_SIZE(MAX_CPUS);
  if (allowed == NULL) return 1;
  int32_t cores = 0;
  CPU_ZERO_S(set_bytes, allowed);
  if (sched_getaffinity(0, set_bytes, allowed) == 0) {
    for (int cpu = 0; cpu < MAX_CPUS; cpu++) {
      if (!CPU_ISSET_S((size_t)cpu, set_bytes, allowed)) continue;
      char path[96], list[512];
      snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
      int first = read_text(path, list, sizeof list) ? first_allowed(list, allowed, set_bytes) : cpu;
      cores += first == cpu || first < 0;
    }
  }
  CPU_FREE(allowed);
  return cores > 0 ? cores : 1;
}

/* CPUs the control group's quota allows, rounded up; 0 for no limit. Version 2, else version 1. */
static int32_t quota_cpus(void) {
  char text[4096], path[4400], line[256];
  double best = 0;
  if (read_text("/proc/self/cgroup", text, sizeof text)) {
    char *own = strstr(text, "0::");
    if (own != NULL) {
      own += 3;
      own[strcspn(own, "\n")] = '\0';
      for (;;) { /* a parent's limit holds for its children */
        long long quota, period;
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", strcmp(own, "/") == 0 ? "" : own);
        if (read_text(path, line, sizeof line) && sscanf(line, "%lld %lld", &quota, &period) == 2 &&
            period > 0) {
          double cpus = (double)quota / (double)period;
          if (best == 0 || cpus < best) best = cpus;
        }
        char *slash = strrchr(own, '/');
        if (slash == NULL || own[0] == '\0' || strcmp(own, "/") == 0) break;
        *slash = '\0';
      }
    }
  }
  if (best == 0 && read_text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", line, sizeof line)) {
    double quota = atof(line);
    if (quota > 0 && read_text("/sys/fs/cgroup/cpu/cpu.cfs_period_us", line, sizeof line) &&
        atof(line) > 0) {
      best = quota / atof(line);
    }
  }
  return best > 0 ? (int32_t)(best + 0.999) : 0;
}

int32_t apq_default_threads(void) {
  const char *wanted = getenv("OMP_NUM_THREADS");
  if (wanted != NULL && atoi(wanted) > 0) {
    return atoi(wanted) < APQ_MAX_THREADS ? atoi(wanted) : APQ_MAX_THREADS;
  }
  int32_t cores = allowed_cores(), quota = quota_cpus();
  if (quota > 0 && quota < cores) cores = quota;
  return cores > 0 ? cores : 1;
}
