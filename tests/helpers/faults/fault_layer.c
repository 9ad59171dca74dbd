/* LD_PRELOAD library between a process and the kernel: makes one file-system call fail, or kill the process,
   or write less than it was asked to. tests/helpers/faults/fault_layer.py drives it.

   A call counts when its name is in the armed list and one of its paths, or that of its descriptor, contains
   the armed text. Disarmed, every call goes straight through. Calls are counted from 1, per process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LET_THROUGH = 0, KILL = -1, SHORT = -2 }; /* anything above 0 is an errno */

static char calls[256], pattern[PATH_MAX];
static long from_call, to_call;
static int outcome;
static atomic_int armed;
static atomic_long counted;
static int no_exchange;

void fault_arm(const char *some_calls, const char *text, long first, long last, int what) {
    snprintf(calls, sizeof calls, " %s ", some_calls);
    snprintf(pattern, sizeof pattern, "%s", text);
    from_call = first, to_call = last, outcome = what;
    counted = 0;
    armed = 1;
}

long fault_disarm(void) {
    armed = 0;
    return counted;
}

void fault_forbid_exchange(int forbid) { no_exchange = forbid; }

static int fires(const char *name, const char *path, const char *other) {
    char word[64];
    if (!armed) return LET_THROUGH;
    snprintf(word, sizeof word, " %s ", name);
    if (!strstr(calls, word)) return LET_THROUGH;
    if (!(path && strstr(path, pattern)) && !(other && strstr(other, pattern))) return LET_THROUGH;
    long number = ++counted;
    if (number < from_call || number > to_call) return LET_THROUGH;
    if (outcome == KILL) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    return outcome;
}

static const char *path_of(int fd, char *buffer) {
    char link[64];
    if (!armed) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    if (length < 0) return NULL;
    buffer[length] = 0;
    return buffer;
}

/* The path of a call that names it relative to a folder's descriptor. */
static const char *path_at(int fd, const char *path, char *buffer) {
    if (!armed || !path || path[0] == '/' || fd == AT_FDCWD) return path;
    if (!path_of(fd, buffer)) return path;
    size_t length = strlen(buffer);
    snprintf(buffer + length, PATH_MAX - length, "/%s", path);
    return buffer;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL(what) \
    do { \
        if ((what) > 0) { \
            errno = (what); \
            return -1; \
        } \
    } while (0)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        int what = fires((flags & O_ACCMODE) == O_RDONLY ? "open_to_read" : "open", path, NULL); \
        FAIL(what); \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        char buffer[PATH_MAX]; \
        const char *whole = path_at(folder, path, buffer); \
        int what = fires((flags & O_ACCMODE) == O_RDONLY ? "open_to_read" : "open", whole, NULL); \
        FAIL(what); \
        return real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

#define PWRITE(name, offset_t) \
    ssize_t name(int fd, const void *data, size_t count, offset_t offset) { \
        REAL(name); \
        char buffer[PATH_MAX]; \
        int what = fires("pwrite", path_of(fd, buffer), NULL); \
        FAIL(what); \
        return real(fd, data, what == SHORT && count > 1 ? count / 2 : count, offset); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t count) {
    REAL(write);
    char buffer[PATH_MAX];
    int what = fires("write", path_of(fd, buffer), NULL);
    FAIL(what);
    return real(fd, data, what == SHORT && count > 1 ? count / 2 : count);
}

#define ON_DESCRIPTOR(name) \
    int name(int fd) { \
        REAL(name); \
        char buffer[PATH_MAX]; \
        int what = fires(#name, path_of(fd, buffer), NULL); \
        FAIL(what); \
        return real(fd); \
    }
ON_DESCRIPTOR(fsync)
ON_DESCRIPTOR(fdatasync)

#define FTRUNCATE(name, offset_t) \
    int name(int fd, offset_t length) { \
        REAL(name); \
        char buffer[PATH_MAX]; \
        int what = fires("ftruncate", path_of(fd, buffer), NULL); \
        FAIL(what); \
        return real(fd, length); \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

int fallocate(int fd, int mode, off_t offset, off_t length) {
    REAL(fallocate);
    char buffer[PATH_MAX];
    int what = fires("fallocate", path_of(fd, buffer), NULL);
    FAIL(what);
    return real(fd, mode, offset, length);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    int what = fires("rename", from, to);
    FAIL(what);
    return real(from, to);
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    REAL(renameat2);
    int what = no_exchange && (flags & 2) ? EINVAL : fires("renameat2", from, to);
    FAIL(what);
    return real(from_folder, from, to_folder, to, flags);
}

#define ON_PATH(name) \
    int name(const char *path) { \
        REAL(name); \
        int what = fires(#name, path, NULL); \
        FAIL(what); \
        return real(path); \
    }
ON_PATH(unlink)
ON_PATH(rmdir)

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    char buffer[PATH_MAX];
    int what = fires(flags & AT_REMOVEDIR ? "rmdir" : "unlink", path_at(folder, path, buffer), NULL);
    FAIL(what);
    return real(folder, path, flags);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    int what = fires("mkdir", path, NULL);
    FAIL(what);
    return real(path, mode);
}
