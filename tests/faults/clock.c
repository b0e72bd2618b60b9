/* A clock that alternates every second between an hour ahead and an hour behind, by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

typedef int (*gets)(clockid_t, struct timespec *);

static int real(clockid_t clock, struct timespec *now) {
    static gets next;
    if (!next) next = (gets)dlsym(RTLD_NEXT, "clock_gettime");
    return next(clock, now);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME) {
        struct timespec steady;
        real(CLOCK_MONOTONIC, &steady);
        now->tv_sec += steady.tv_sec % 2 ? 3600 : -3600;
    }
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
