/* What runs programs on a device: agent facts, or agent run FOLDER MILLISECONDS PROGRAM [ARGUMENT...].
 *
 * `run` starts the program in the folder, ends it with all it started when the time is over, and says
 * in the last line of standard error how it ended: whoever reads no such line knows that the connection
 * failed, and not the program. `facts` says what device this is. One static program for any Linux. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int64_t now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* The first line of /proc/cpuinfo that begins with `name`, behind its colon. */
static void cpuinfo(const char *name) {
  static char line[1 << 15];
  FILE *file = fopen("/proc/cpuinfo", "r");
  while (file != NULL && fgets(line, sizeof line, file) != NULL) {
    char *colon = strchr(line, ':');
    if (strncmp(line, name, strlen(name)) != 0 || colon == NULL) continue;
    line[strcspn(line, "\n")] = '\0';
    printf("%s:%s\n", name, colon + 1);
    break;
  }
  if (file != NULL) fclose(file);
}

static int facts(void) {
  struct utsname name;
  if (uname(&name) != 0) return 1;
  printf("arch: %s\nsystem: %s %s\ncores: %ld\n", name.machine, name.sysname, name.release,
         sysconf(_SC_NPROCESSORS_ONLN));
  printf("memory: %lld\n", (long long)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE));
  printf("hwcap: %lu\nhwcap2: %lu\n", getauxval(AT_HWCAP), getauxval(AT_HWCAP2));
#if defined(__x86_64__)
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* as the runtime's tiles.c asks */
  printf("tiles: %d\n", syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0);
  cpuinfo("flags");
  cpuinfo("model name");
#else
  cpuinfo("CPU implementer");
  cpuinfo("CPU part");
#endif
  return 0;
}

static int said(const char *how, int number) {
  fflush(stdout);
  fprintf(stderr, "\napq-agent: %s %d\n", how, number);
  return 0;
}

static int run(char **argv) {
  char *end;
  long allowed = strtol(argv[1], &end, 10);
  if (*end != '\0' || allowed <= 0 || chdir(argv[0]) != 0) return said("fault", errno ? errno : EINVAL);
  if (strchr(argv[2], '/') == NULL) chmod(argv[2], 0700); /* transfers may lose the mode */
  signal(SIGHUP, SIG_IGN); /* it ends by its time in any case, and then cleans up */
  sigset_t ended, before;
  sigemptyset(&ended);
  sigaddset(&ended, SIGCHLD);
  sigprocmask(SIG_BLOCK, &ended, &before);
  pid_t child = fork();
  if (child < 0) return said("fault", errno);
  if (child == 0) {
    char path[4096];
    setpgid(0, 0);
    sigprocmask(SIG_SETMASK, &before, NULL);
    signal(SIGHUP, SIG_DFL);
    snprintf(path, sizeof path, "./%s", argv[2]);
    if (strchr(argv[2], '/') == NULL && access(path, X_OK) == 0) execv(path, argv + 2);
    execvp(argv[2], argv + 2);
    fprintf(stderr, "%s: %s\n", argv[2], strerror(errno));
    _exit(127);
  }
  setpgid(child, child);
  int64_t until = now_ms() + allowed;
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    int64_t left = until - now_ms();
    if (left <= 0) {
      kill(-child, SIGKILL);
      waitpid(child, &status, 0);
      return said("timeout", (int)allowed);
    }
    struct timespec wait = {left / 1000, left % 1000 * 1000000};
    sigtimedwait(&ended, NULL, &wait); /* sleeps: what is timed must not be disturbed */
  }
  kill(-child, SIGKILL); /* what it left behind */
  if (WIFSIGNALED(status)) return said("signal", WTERMSIG(status));
  return said("exit", WEXITSTATUS(status));
}

int main(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], "facts") == 0) return facts();
  if (argc >= 5 && strcmp(argv[1], "run") == 0) return run(argv + 2);
  fputs("agent facts | agent run FOLDER MILLISECONDS PROGRAM [ARGUMENT...]\n", stderr);
  return 2;
}
