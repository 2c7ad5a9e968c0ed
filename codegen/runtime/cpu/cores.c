/* How many threads runs have to begin with: the physical cores this process may use. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "apq_runtime.h"

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
