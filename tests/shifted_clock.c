// Preloaded by tests/shake.py: the wall clock is CLOCK_SHIFT_S seconds ahead. All other clocks stay.
//
// libfaketime cannot do that for Python 3.11 and newer: with its monotonic clock shifted, locks wait for ever
// (sem_clockwait); without, time.sleep fails (clock_nanosleep). Nothing here waits for locks or looks up symbols.

#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t shift(void) {
    static time_t seconds;
    static int is_known;
    if (!is_known) {
        const char *text = getenv("CLOCK_SHIFT_S");
        seconds = text ? atoll(text) : 0;
        is_known = 1;
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI))
        now->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed)
        now->tv_sec += shift();
    return failed;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, now) ? base : 0;
}
