/* The three functions of libgomp that a module calls, on threads that TSan sees start and end: what
 * orders libgomp's own threads are futexes, which TSan knows nothing of. */
#include <pthread.h>
#include <stdlib.h>

typedef struct {
  void (*body)(void *);
  void *data;
  int number, team;
} member;

static _Thread_local int number = 0, team = 1;

int omp_get_thread_num(void) { return number; }
int omp_get_num_threads(void) { return team; }

static void *act(void *data) {
  member *m = data;
  number = m->number;
  team = m->team;
  m->body(m->data);
  return NULL;
}

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
  (void)flags;
  pthread_t started[64];
  member members[64];
  for (unsigned i = 0; i < threads; i++) {
    members[i] = (member){body, data, (int)i, (int)threads};
    if (i > 0 && pthread_create(&started[i], NULL, act, &members[i]) != 0) abort();
  }
  act(&members[0]);
  for (unsigned i = 1; i < threads; i++) pthread_join(started[i], NULL);
  number = 0;
  team = 1;
}
