/* A team: the thread that runs a model, and helpers of our own, which share parallel loops out.
 *
 * Tasks of a loop are claimed, not dealt. What is left to claim is one atomic word, and so is which loop
 * it is of: a helper that comes late finds another number there and claims nothing of a loop that is
 * over. The thread that runs claims too, until nothing is left, and then waits for claims of others that
 * are not done yet: never for a helper that sleeps, or has no CPU, or never came.
 *
 * Pieces get smaller towards the end of a loop (guided self-scheduling: Polychronopoulos and Kuck, 1987),
 * so that few claims are made and all threads end together.
 *
 * Who waits spins for a while and then sleeps in the kernel. Nobody is woken who does not sleep, nor on the
 * CPU of the thread that runs. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "apq_threads.h"

/* linux/futex.h, which musl's compiler does not find. */
enum { FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 };

enum {
  LINE = 128,           /* bytes that travel between caches at once: pairs of lines on x86 */
  HELPER_SPIN = 50000,  /* nanoseconds: a MiniLM of 16 tokens takes a tenth longer with 10000, with 100000 as long */
  RUNNER_SPIN = 50000,  /* longer than a piece at the end of a loop */
  PAUSES = 32           /* between two looks at the clock */
};

typedef struct {
  pthread_t thread;
  apq_team *team;
  atomic_int number; /* what the kernel calls it; 0 until it runs */
} helper;

struct apq_team {
  /* Number of the loop (32 bits), its tasks (16), the next that nobody has claimed (16). */
  _Alignas(LINE) _Atomic uint64_t word;
  apq_loop loop; /* read by those alone who hold a claim */
  /* The number of the loop, which helpers sleep on, and whether some may. In the same line: a post is to
   * cost one miss on either side. */
  atomic_uint posted;
  atomic_int asleep, stop;
  int32_t wanted; /* helpers asked for */
  /* Tasks that helpers have ever done, which the thread that runs sleeps on, and whether it may. */
  _Alignas(LINE) atomic_uint done;
  atomic_int waiting;
  _Alignas(LINE) apq_worth worth;
  unsigned helped; /* what `done` is when nothing is claimed */
  int32_t helpers; /* started */
  int32_t runner;  /* the CPU that they keep off; -1 for none */
  helper each[];
};

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory"); /* as long as x86's pause; yield is a nop on most cores */
#endif
}

static int futex_wait(atomic_uint *at, unsigned value) {
  return (int)syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static int futex_wake(atomic_uint *at, int32_t threads) {
  return (int)syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, threads, NULL, NULL, 0);
}

/* ---- claims ---- */

static uint32_t left_of(uint64_t word) {
  uint32_t tasks = (uint32_t)(word >> 16) & 0xffff, next = (uint32_t)word & 0xffff;
  return tasks - next;
}

/* Does what it can claim of the loop at hand; the number of tasks. */
static int32_t work_off(apq_team *team) {
  int32_t did = 0;
  uint64_t seen = atomic_load_explicit(&team->word, memory_order_acquire);
  for (uint32_t left; (left = left_of(seen)) > 0;) {
    uint32_t piece = left / ((uint32_t)team->wanted + 1);
    if (piece == 0) piece = 1;
    if (!atomic_compare_exchange_weak_explicit(&team->word, &seen, seen + piece, memory_order_acq_rel,
                                               memory_order_acquire)) {
      continue;
    }
    int32_t first = (int32_t)(seen & 0xffff);
    for (int32_t t = first; t < first + (int32_t)piece; t++) team->loop.task(team->loop.work, t);
    did += (int32_t)piece;
    seen = atomic_load_explicit(&team->word, memory_order_acquire);
  }
  return did;
}

/* ---- helpers ---- */

/* Spins until there is something to claim; 0 if there was nothing for too long. */
static int spin_for_work(apq_team *team) {
  int64_t until = apq_clock(CLOCK_MONOTONIC) + HELPER_SPIN;
  do {
    for (int i = 0; i < PAUSES; i++) {
      if (left_of(atomic_load_explicit(&team->word, memory_order_relaxed)) > 0) return 1;
      if (atomic_load_explicit(&team->stop, memory_order_relaxed)) return 1;
      relax();
    }
  } while (apq_clock(CLOCK_MONOTONIC) < until);
  return 0;
}

/* Sleeps unless a loop was posted since `posted` was looked at. */
static void sleep_until_posted(apq_team *team) {
  unsigned seen = atomic_load(&team->posted);
  atomic_store(&team->asleep, 1);
  if (left_of(atomic_load(&team->word)) > 0 || atomic_load(&team->stop)) return;
  (void)futex_wait(&team->posted, seen);
}

static void *help(void *data) {
  helper *me = data;
  apq_team *team = me->team;
  atomic_store(&me->number, apq_thread_number());
  while (!atomic_load(&team->stop)) {
    int32_t did = work_off(team);
    if (did > 0) {
      atomic_fetch_add(&team->done, (unsigned)did);
      if (atomic_load(&team->waiting)) (void)futex_wake(&team->done, 1);
    }
    if (!spin_for_work(team)) sleep_until_posted(team);
  }
  return NULL;
}

/* Before helpers wake: seldom new, since the thread that runs seldom moves. */
static void keep_off_runner(apq_team *team) {
  int32_t cpu = apq_this_cpu();
  if (cpu < 0 || cpu == team->runner) return;
  team->runner = cpu;
  for (int32_t i = 0; i < team->helpers; i++) {
    int32_t number = atomic_load(&team->each[i].number);
    if (number == 0) {
      team->runner = -1; /* it has not begun: the next time */
    } else {
      (void)apq_keep_off(cpu, number);
    }
  }
}

static void post(apq_team *team, const apq_loop *loop, int32_t awake) {
  unsigned number = atomic_load_explicit(&team->posted, memory_order_relaxed) + 1;
  team->loop = *loop;
  uint64_t word = (uint64_t)number << 32 | (uint64_t)loop->count << 16;
  atomic_store_explicit(&team->word, word, memory_order_release);
  atomic_store(&team->posted, number); /* in one order with what helpers do who are about to sleep */
  if (atomic_load(&team->asleep) == 0) return;
  keep_off_runner(team);
  atomic_store(&team->asleep, 0);
  if (futex_wake(&team->posted, awake) == awake && awake < team->helpers) atomic_store(&team->asleep, 1);
}

/* ---- the thread that runs ---- */

/* Waits until helpers have done what `done` is then; the nanoseconds that it spun. */
static int64_t wait_for(apq_team *team, unsigned done, int64_t from) {
  int64_t now = from;
  while (atomic_load_explicit(&team->done, memory_order_acquire) != done) {
    if (now - from > RUNNER_SPIN) {
      atomic_store(&team->waiting, 1);
      for (unsigned seen; (seen = atomic_load(&team->done)) != done;) (void)futex_wait(&team->done, seen);
      atomic_store(&team->waiting, 0);
      break;
    }
    for (int i = 0; i < PAUSES && atomic_load_explicit(&team->done, memory_order_relaxed) != done; i++) relax();
    now = apq_clock(CLOCK_MONOTONIC);
  }
  return now - from;
}

int apq_team_pays(const apq_team *team) {
  return team->worth.alone_until == 0 || !apq_worth_alone(&team->worth, apq_clock(CLOCK_MONOTONIC));
}

void apq_team_loop(apq_team *team, const apq_loop *loop, int32_t awake) {
  int64_t start = apq_clock(CLOCK_MONOTONIC);
  apq_worth_begin(&team->worth, start);
  post(team, loop, awake < team->helpers ? awake : team->helpers);
  int32_t did = work_off(team), others = loop->count - did;
  int64_t ran = apq_clock(CLOCK_MONOTONIC);
  team->helped += (unsigned)others;
  int64_t spun = others > 0 ? wait_for(team, team->helped, ran) : 0;
  int64_t a_task = did > 0 ? (ran - start) / did : (ran + spun - start) / others;
  apq_worth_note(&team->worth, ran + spun, others * a_task, spun);
}

void apq_team_end(apq_team *team) {
  if (team->worth.since != 0) apq_worth_end(&team->worth, apq_clock(CLOCK_MONOTONIC));
}

/* ---- its beginning and end ---- */

int32_t apq_team_helpers(const apq_team *team) { return team->helpers; }

static int32_t start_helpers(apq_team *team) {
  sigset_t every, before;
  int32_t started = 0;
  sigfillset(&every); /* signals are the program's: its own threads handle them */
  pthread_sigmask(SIG_SETMASK, &every, &before);
  for (; started < team->wanted; started++) {
    helper *next = &team->each[started];
    next->team = team;
    if (pthread_create(&next->thread, NULL, help, next) != 0) break;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return started;
}

apq_team *apq_team_open(int32_t helpers) {
  void *memory = NULL;
  size_t bytes = sizeof(apq_team) + sizeof(helper) * (size_t)helpers;
  if (posix_memalign(&memory, LINE, bytes) != 0) return NULL;
  apq_team *team = memset(memory, 0, bytes);
  team->wanted = helpers;
  team->runner = -1;
  team->helpers = start_helpers(team);
  if (team->helpers > 0) return team;
  free(team);
  return NULL;
}

void apq_team_close(apq_team *team) {
  atomic_store(&team->stop, 1);
  atomic_fetch_add(&team->posted, 1);
  (void)futex_wake(&team->posted, team->helpers);
  for (int32_t i = 0; i < team->helpers; i++) pthread_join(team->each[i].thread, NULL);
  free(team);
}
