/* LD_PRELOAD: below a folder, files are as those of a network's file system may be. Locks aren't seen by anybody else;
   the first opening of each file ends with ESTALE; files with some endings are seen some seconds after they were first
   looked for. Told by environment variables (hosts.py). */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 4096 };

static const char *folder, *late, *stale, *mounts;
static double late_s;
static struct entry { unsigned long name; double first; int is_stale; } entries[MOST];

__attribute__((constructor)) static void begin(void)
{
    folder = getenv("LOWVRAM_NFS_FOLDER");
    late = getenv("LOWVRAM_NFS_LATE");
    stale = getenv("LOWVRAM_NFS_STALE");
    mounts = getenv("LOWVRAM_NFS_MOUNTS"); /* what stands for the table of file systems */
    const char *seconds = getenv("LOWVRAM_NFS_LATE_S");
    late_s = seconds ? atof(seconds) : 0;
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + 1e-9 * at.tv_nsec;
}

static struct entry *of(const char *path)
{
    unsigned long hash = 5381;
    for (const char *at = path; *at; at++)
        hash = hash * 33 + (unsigned char)*at;
    for (unsigned long i = 0; i < MOST; i++) {
        struct entry *entry = &entries[(hash + i) % MOST];
        if (!entry->name)
            entry->name = hash;
        if (entry->name == hash)
            return entry;
    }
    return &entries[0];
}

static int is_below(const char *path) { return folder && path && !strncmp(path, folder, strlen(folder)); }

static int ends_with(const char *path, const char *end)
{
    size_t length = strlen(path), part = strlen(end);
    return part <= length && !strcmp(path + length - part, end);
}

/* Whether a file isn't seen yet; errno is set then. */
static int is_late(const char *path)
{
    if (!late || !is_below(path) || !ends_with(path, late))
        return 0;
    struct entry *entry = of(path);
    if (!entry->first)
        entry->first = now();
    if (now() - entry->first >= late_s)
        return 0;
    errno = ENOENT;
    return 1;
}

static int is_stale(const char *path)
{
    if (!stale || !is_below(path) || !ends_with(path, stale) || of(path)->is_stale++)
        return 0;
    errno = ESTALE;
    return 1;
}

static const char *named(int at, const char *path, char *whole)
{
    if (!path || path[0] == '/' || at == AT_FDCWD)
        return path;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    ssize_t length = readlink(link, whole, PATH_MAX - 1);
    if (length < 0)
        return path;
    snprintf(whole + length, PATH_MAX - length, "/%s", path);
    return whole;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define MODE(flags) mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { \
    va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

static const char *seen_as(const char *path)
{
    return mounts && path && !strcmp(path, "/proc/self/mountinfo") ? mounts : path;
}

static int fails(const char *path, int flags)
{
    if (flags & (O_CREAT | O_DIRECTORY))
        return 0;
    return is_late(path) || is_stale(path);
}

int open(const char *path, int flags, ...)
{
    MODE(flags)
    REAL(open);
    return fails(path, flags) ? -1 : real(seen_as(path), flags, mode);
}

int open64(const char *path, int flags, ...)
{
    MODE(flags)
    REAL(open64);
    return fails(path, flags) ? -1 : real(seen_as(path), flags, mode);
}

int openat(int at, const char *path, int flags, ...)
{
    char whole[PATH_MAX];
    MODE(flags)
    REAL(openat);
    return fails(named(at, path, whole), flags) ? -1 : real(at, path, flags, mode);
}

int openat64(int at, const char *path, int flags, ...)
{
    char whole[PATH_MAX];
    MODE(flags)
    REAL(openat64);
    return fails(named(at, path, whole), flags) ? -1 : real(at, path, flags, mode);
}

int stat(const char *path, struct stat *about)
{
    REAL(stat);
    return is_late(path) ? -1 : real(path, about);
}

int stat64(const char *path, struct stat64 *about)
{
    REAL(stat64);
    return is_late(path) ? -1 : real(path, about);
}

int lstat(const char *path, struct stat *about)
{
    REAL(lstat);
    return is_late(path) ? -1 : real(path, about);
}

int lstat64(const char *path, struct stat64 *about)
{
    REAL(lstat64);
    return is_late(path) ? -1 : real(path, about);
}

int fstatat(int at, const char *path, struct stat *about, int flags)
{
    char whole[PATH_MAX];
    REAL(fstatat);
    return is_late(named(at, path, whole)) ? -1 : real(at, path, about, flags);
}

int fstatat64(int at, const char *path, struct stat64 *about, int flags)
{
    char whole[PATH_MAX];
    REAL(fstatat64);
    return is_late(named(at, path, whole)) ? -1 : real(at, path, about, flags);
}

struct dirent *readdir(DIR *listed)
{
    char whole[PATH_MAX];
    REAL(readdir);
    struct dirent *entry;
    do
        entry = real(listed);
    while (entry && is_late(named(dirfd(listed), entry->d_name, whole)));
    return entry;
}

struct dirent64 *readdir64(DIR *listed)
{
    char whole[PATH_MAX];
    REAL(readdir64);
    struct dirent64 *entry;
    do
        entry = real(listed);
    while (entry && is_late(named(dirfd(listed), entry->d_name, whole)));
    return entry;
}

int flock(int fd, int how)
{
    char whole[PATH_MAX];
    REAL(flock);
    return is_below(named(fd, ".", whole)) ? 0 : real(fd, how);
}
