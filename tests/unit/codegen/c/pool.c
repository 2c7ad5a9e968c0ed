/* The pool of codegen/runtime/cpu by itself: `pool CASE`. Helpers are started by start_helper below. */
#undef pthread_create /* start_helper, in the files that are checked */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "apq_threads.h"

#define CHECK(condition)                                               \
  do {                                                                 \
    if (!(condition)) {                                                \
      fprintf(stderr, "line %d: %s\n", __LINE__, #condition);          \
      _exit(1);                                                        \
    }                                                                  \
  } while (0)

/* ---- how helpers start ---- */

static int helpers_allowed = 1024; /* more cannot be started */
static int held_back = 0;          /* they start, but never come to work */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

typedef struct {
  void *(*routine)(void *);
  void *data;
} held;

static void *pass_gate(void *data) {
  held h = *(held *)data;
  free(data);
  pthread_mutex_lock(&gate);
  pthread_mutex_unlock(&gate);
  return h.routine(h.data);
}

int start_helper(pthread_t *thread, const pthread_attr_t *attr, void *(*routine)(void *), void *data) {
  if (helpers_allowed == 0) return 11; /* EAGAIN */
  helpers_allowed--;
  if (!held_back) return pthread_create(thread, attr, routine, data);
  held *h = malloc(sizeof *h);
  *h = (held){routine, data};
  return pthread_create(thread, attr, pass_gate, h);
}

/* ---- loops that count ---- */

enum { MOST = 4096 };

typedef struct {
  atomic_int done[MOST], elsewhere;
  pthread_t runner;
} counts;

static void count(void *work, int32_t task) {
  counts *c = work;
  atomic_fetch_add(&c->done[task], 1);
  if (!pthread_equal(pthread_self(), c->runner)) atomic_fetch_add(&c->elsewhere, 1);
}

/* Runs a loop and checks that each task was done once; how many were done by helpers. */
static int run(apq_team *team, int32_t tasks) {
  counts *c = calloc(1, sizeof *c);
  c->runner = pthread_self();
  apq_loop loop = {count, c, tasks};
  apq_team_loop(team, &loop, 64);
  for (int i = 0; i < MOST; i++) CHECK(atomic_load(&c->done[i]) == (i < tasks));
  int elsewhere = atomic_load(&c->elsewhere);
  free(c);
  return elsewhere;
}

static void once_each(void) {
  static const int32_t sizes[] = {1, 2, 3, 7, 16, 100, 1000, MOST};
  for (int32_t threads = 2; threads <= 5; threads++) {
    apq_team *team = apq_pool_take(threads);
    CHECK(apq_team_helpers(team) == threads - 1);
    for (int i = 0; i < 400; i++) {
      run(team, sizes[i % 8]);
      if (i % 100 == 0) usleep(1000); /* helpers fall asleep */
    }
    apq_pool_give(team);
  }
}

static void held_back_helper(void) {
  held_back = 1;
  pthread_mutex_lock(&gate);
  apq_team *team = apq_pool_take(3);
  CHECK(team != NULL);
  for (int i = 0; i < 200; i++) CHECK(run(team, 50) == 0);
  pthread_mutex_unlock(&gate);
  /* They come late, find nothing of those loops, and help with the next. */
  for (int i = 0; i < 200; i++) run(team, 50);
  apq_pool_give(team);
}

/* A task that waits until another has begun: no thread can do both. */
static atomic_int begun;

static void meet(void *work, int32_t task) {
  (void)work, (void)task;
  atomic_fetch_add(&begun, 1);
  while (atomic_load(&begun) % 2 != 0) usleep(10);
}

static void claims_are_waited_for(void) {
  apq_team *team = apq_pool_take(2);
  for (int i = 0; i < 50; i++) {
    apq_loop loop = {meet, NULL, 2};
    apq_team_loop(team, &loop, 1);
    CHECK(atomic_load(&begun) == 2 * (i + 1));
  }
  apq_pool_give(team);
}

static void limits(void) {
  helpers_allowed = 2;
  apq_team *team = apq_pool_take(8);
  CHECK(apq_team_helpers(team) == 2 && apq_pool_usable(8) == 3);
  run(team, 100);
  apq_pool_give(team);
  CHECK(apq_pool_take(8) == team); /* it does not try again each time */
  CHECK(apq_pool_take(8) == NULL);
  apq_pool_give(team);
  helpers_allowed = 100;
  for (int i = 0; apq_pool_usable(8) < 8; i++) {
    CHECK(i < 100000);
    apq_pool_give(apq_pool_take(8));
  }
}

/* Two runs at once have helpers of their own, as far as there are cores to spare (OMP_NUM_THREADS=4). */
static void runs_at_once(void) {
  apq_team *first = apq_pool_take(3), *second = apq_pool_take(3), *third = apq_pool_take(3);
  CHECK(apq_team_helpers(first) == 2 && apq_team_helpers(second) == 1 && third == NULL);
  run(first, 100);
  run(second, 100);
  apq_pool_give(first);
  apq_pool_give(second);
  first = apq_pool_take(4);
  CHECK(apq_team_helpers(first) == 3);
  apq_pool_give(first);
}

static atomic_int over;

static void *keep_running(void *data) {
  (void)data;
  while (!atomic_load(&over)) {
    apq_team *team = apq_pool_take(2);
    if (team != NULL) run(team, 50);
    apq_pool_give(team);
  }
  return NULL;
}

static void forks(void) {
  pthread_t other;
  CHECK(pthread_create(&other, NULL, keep_running, NULL) == 0);
  for (int i = 0; i < 20; i++) {
    pid_t child = fork();
    if (child == 0) {
      atomic_store(&begun, 0);
      claims_are_waited_for();
      exit(0); /* with what is done at the end of a process */
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
  }
  atomic_store(&over, 1);
  pthread_join(other, NULL);
}

static int cpus_of(pid_t thread) {
  cpu_set_t allowed;
  CHECK(sched_getaffinity(thread, sizeof allowed, &allowed) == 0);
  return CPU_COUNT(&allowed);
}

static atomic_int helper_number;

static void meet_and_tell(void *work, int32_t task) {
  if (!pthread_equal(pthread_self(), *(pthread_t *)work)) atomic_store(&helper_number, apq_thread_number());
  meet(NULL, task);
}

/* A helper that slept may run where the thread that runs may, but not beside it. */
static void keeps_off(void) {
  cpu_set_t before, one;
  CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  apq_team *team = apq_pool_take(2);
  pthread_t runner = pthread_self();
  apq_loop loop = {meet_and_tell, &runner, 2};
  for (int i = 0; i < 3; i++) {
    usleep(2000);
    apq_team_loop(team, &loop, 1);
  }
  int32_t helper = atomic_load(&helper_number);
  CHECK(cpus_of(helper) == (CPU_COUNT(&before) > 1 ? CPU_COUNT(&before) - 1 : 1));
  CHECK(cpus_of(0) == CPU_COUNT(&before)); /* the program's own thread is the program's */
  CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
  usleep(2000);
  run(team, 50); /* nothing is left to it: it stays where it may be */
  CHECK(cpus_of(helper) >= 1);
  apq_pool_give(team);
}

enum { MS = 1000000 };

/* Helpers do a millisecond's work in a stretch, in which the thread has its CPU for one too. */
static void pass(apq_worth *w, int64_t *now, int milliseconds) {
  apq_worth_begin(w, *now);
  *now += milliseconds * MS;
  w->cpu_since = apq_clock(CLOCK_THREAD_CPUTIME_ID) - 1 * MS;
  apq_worth_note(w, *now, MS, 0);
}

/* How long the thread runs alone behind so many good stretches and one of 5 ms, again and again. */
static int64_t alone_behind(apq_worth *w, int64_t *now, int good) {
  int64_t alone = 0;
  for (int i = 0; i < 20; i++) {
    for (int stretch = 0; stretch < good; stretch++) pass(w, now, 1);
    pass(w, now, 5);
    alone = w->alone_until - *now;
    *now = w->alone_until;
  }
  return alone;
}

/* What helpers gained and cost, told by a clock of ours. */
static void worth(void) {
  apq_worth w = {0};
  int64_t now = 1, before = 0;
  for (int i = 0; i < 10; i++) { /* they do half of the work */
    pass(&w, &now, 1);
    CHECK(!apq_worth_alone(&w, now));
  }
  for (int i = 0; i < 10; i++) { /* each time the thread waits for 3 ms */
    pass(&w, &now, 4);
    CHECK(apq_worth_alone(&w, now + 5 * MS) && !apq_worth_alone(&w, now + 251 * MS));
    CHECK(w.alone_until - now >= before);
    before = w.alone_until - now;
    now = w.alone_until;
  }
  CHECK(w.sentence > 100);
  now += 1000 * MS; /* a neighbour of a second ago is forgotten */
  pass(&w, &now, 4);
  CHECK(apq_worth_alone(&w, now + 5 * MS) && !apq_worth_alone(&w, now + 9 * MS));
  CHECK(before == 250 * MS);
  CHECK(alone_behind(&w, &now, 2) == 250 * MS); /* they work well for their slice, and lose their CPU then */
  CHECK(alone_behind(&w, &now, 19) < 9 * MS);   /* they had earned what is lost then: twice that alone */
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    void (*check)(void);
  } cases[] = {
      {"once_each", once_each}, {"held_back_helper", held_back_helper}, {"limits", limits},
      {"claims_are_waited_for", claims_are_waited_for}, {"runs_at_once", runs_at_once},
      {"forks", forks}, {"keeps_off", keeps_off}, {"worth", worth},
  };
  CHECK(argc == 2 && apq_pool_open());
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    if (strcmp(cases[i].name, argv[1]) != 0) continue;
    cases[i].check();
    puts("done");
    return 0;
  }
  return 2;
}
