// Preloaded into processes whose wall clock a test sets. All other clocks stay.
//
// CLOCK_SHIFT_S: seconds ahead. CLOCK_FILE: a file of two integers of 64 bits that may change at any time: more seconds
// ahead, and the time at which the clock stands still (0: it runs).
//
// libfaketime cannot do that for Python 3.11 and newer: with its monotonic clock shifted, locks wait for ever
// (sem_clockwait); without, time.sleep fails (clock_nanosleep). Nothing here takes locks or looks up symbols.

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none[2], *file = none;
static int64_t shift_s;

static void read_settings(void) {
    static volatile int is_done;
    if (is_done)
        return;
    const char *seconds = getenv("CLOCK_SHIFT_S"), *path = getenv("CLOCK_FILE");
    if (seconds)
        shift_s = atoll(seconds);
    int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (descriptor >= 0) {
        void *memory = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, descriptor, 0);
        if (memory != MAP_FAILED)
            file = memory;
        close(descriptor);
    }
    is_done = 1;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (failed || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE && clock != CLOCK_TAI))
        return failed;
    read_settings();
    now->tv_sec += shift_s + file[0];
    int64_t stopped_at = file[1];
    if (stopped_at)
        *now = (struct timespec){.tv_sec = stopped_at};
    return 0;
}

int gettimeofday(struct timeval *restrict result, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now))
        return -1;
    *result = (struct timeval){.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
    return 0;
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
