/* Preloaded into a process: the clock of the calendar shows as many seconds more as the file MOVED_CLOCK says, which may
   change at any time. Steady clocks and waits are left alone, as when somebody sets the clock of a machine. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *moved;

static void __attribute__((constructor)) begin(void) {
  const char *path = getenv("MOVED_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  void *found = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) moved = found;
  if (file >= 0) close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*genuine)(clockid_t, struct timespec *);
  if (!genuine) genuine = dlsym(RTLD_NEXT, "clock_gettime");
  int code = genuine(clock, now);
  if (code == 0 && moved && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *moved;
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec fine;
  int code = clock_gettime(CLOCK_REALTIME, &fine);
  now->tv_sec = fine.tv_sec, now->tv_usec = fine.tv_nsec / 1000;
  return code;
}

time_t time(time_t *place) {
  struct timespec fine;
  clock_gettime(CLOCK_REALTIME, &fine);
  return place ? (*place = fine.tv_sec) : fine.tv_sec;
}

/* A wait until a time of the calendar ends when it would have: the kernel knows nothing of the move. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
  static int (*genuine)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!genuine) genuine = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  struct timespec truly = *until;
  if (moved && truly.tv_sec > 1000000000) truly.tv_sec -= *moved; /* a steady clock has not come so far */
  return genuine(condition, mutex, &truly);
}
