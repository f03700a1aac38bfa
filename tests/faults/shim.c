/* LD_PRELOAD: counts what changes files below a folder, and makes the N-th of these calls fail, or kills processes
   there. What it does is read at each call from a page of memory that the test shares with all processes (shim.py). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, RENAME = 4, FSYNC = 8, UNLINK = 16, MKDIR = 32 };
enum { COUNT = 0, FAIL = 1, FAIL_FROM = 2, KILL = 3 };
enum { NUM_VICTIMS = 3, LONGEST = 1024 };

struct page { /* as in shim.py */
    uint32_t operations; /* that count; none: nothing is looked at */
    uint32_t action;
    int32_t error;
    int32_t signal;
    uint32_t victims; /* bits: of the program, the fork server, the point's process */
    int32_t pids[NUM_VICTIMS];
    uint64_t count;
    uint64_t target;
    char folder[LONGEST];
    char hit[LONGEST]; /* the call that was chosen, in words */
};

static struct page *page;

__attribute__((constructor)) static void map_page(void)
{
    const char *path = getenv("LOWVRAM_FAULT_PAGE");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *mapped = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED)
        page = mapped;
    if (fd >= 0)
        close(fd);
}

static void of_descriptor(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, LONGEST - 1);
    path[length < 0 ? 0 : length] = 0;
}

static void of_name(int folder, const char *name, char *path)
{
    if (name[0] == '/') {
        snprintf(path, LONGEST, "%s", name);
        return;
    }
    char start[LONGEST];
    if (folder == AT_FDCWD) {
        if (!getcwd(start, sizeof start))
            start[0] = 0;
    } else
        of_descriptor(folder, start);
    snprintf(path, LONGEST, "%.*s/%.*s", LONGEST / 2 - 1, start, LONGEST / 2 - 1, name);
}

static void kill_victims(void)
{
    int is_me = 0;
    for (int i = 0; i < NUM_VICTIMS; i++) {
        int pid = page->pids[i];
        if (!(page->victims & 1u << i) || pid <= 0)
            continue;
        if (pid == getpid())
            is_me = 1;
        else
            kill(pid, page->signal);
    }
    if (is_me)
        kill(getpid(), page->signal);
}

/* Whether this call is to fail; errno is set then. */
static int hit(const char *what, const char *path)
{
    size_t length = strlen(page->folder);
    if (strncmp(path, page->folder, length) || (path[length] && path[length] != '/'))
        return 0;
    uint64_t number = __atomic_add_fetch(&page->count, 1, __ATOMIC_SEQ_CST);
    if (page->action == COUNT || number < page->target || (number > page->target && page->action != FAIL_FROM))
        return 0;
    if (number == page->target)
        snprintf(page->hit, LONGEST, "%s %.*s", what, LONGEST - 16, path[length] ? path + length + 1 : ".");
    if (page->action == KILL) {
        kill_victims();
        return 0;
    }
    errno = page->error;
    return 1;
}

static int fails_fd(unsigned operation, const char *what, int fd)
{
    if (!page || !(page->operations & operation) || fd < 3)
        return 0;
    int before = errno;
    char path[LONGEST];
    of_descriptor(fd, path);
    errno = before;
    return hit(what, path);
}

static int fails_at(unsigned operation, const char *what, int folder, const char *name)
{
    if (!page || !(page->operations & operation) || !name)
        return 0;
    int before = errno;
    char path[LONGEST];
    of_name(folder, name, path);
    errno = before;
    return hit(what, path);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int changes(int flags) { return flags & (O_CREAT | O_TRUNC) || (flags & O_ACCMODE) != O_RDONLY; }

#define MODE(flags) mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { \
    va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

int open(const char *path, int flags, ...)
{
    MODE(flags)
    REAL(open);
    return changes(flags) && fails_at(OPEN, "open", AT_FDCWD, path) ? -1 : real(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    MODE(flags)
    REAL(open64);
    return changes(flags) && fails_at(OPEN, "open", AT_FDCWD, path) ? -1 : real(path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...)
{
    MODE(flags)
    REAL(openat);
    return changes(flags) && fails_at(OPEN, "open", folder, path) ? -1 : real(folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...)
{
    MODE(flags)
    REAL(openat64);
    return changes(flags) && fails_at(OPEN, "open", folder, path) ? -1 : real(folder, path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t size)
{
    REAL(write);
    return fails_fd(WRITE, "write", fd) ? -1 : real(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
{
    REAL(pwrite);
    return fails_fd(WRITE, "write", fd) ? -1 : real(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
{
    REAL(pwrite64);
    return fails_fd(WRITE, "write", fd) ? -1 : real(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *pieces, int count)
{
    REAL(writev);
    return fails_fd(WRITE, "write", fd) ? -1 : real(fd, pieces, count);
}

int ftruncate(int fd, off_t size)
{
    REAL(ftruncate);
    return fails_fd(WRITE, "truncate", fd) ? -1 : real(fd, size);
}

int ftruncate64(int fd, off64_t size)
{
    REAL(ftruncate64);
    return fails_fd(WRITE, "truncate", fd) ? -1 : real(fd, size);
}

int fsync(int fd)
{
    REAL(fsync);
    return fails_fd(FSYNC, "fsync", fd) ? -1 : real(fd);
}

int fdatasync(int fd)
{
    REAL(fdatasync);
    return fails_fd(FSYNC, "fsync", fd) ? -1 : real(fd);
}

int rename(const char *from, const char *to)
{
    REAL(rename);
    return fails_at(RENAME, "rename", AT_FDCWD, to) ? -1 : real(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to)
{
    REAL(renameat);
    return fails_at(RENAME, "rename", to_folder, to) ? -1 : real(from_folder, from, to_folder, to);
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags)
{
    REAL(renameat2);
    return fails_at(RENAME, "rename", to_folder, to) ? -1 : real(from_folder, from, to_folder, to, flags);
}

int link(const char *from, const char *to)
{
    REAL(link);
    return fails_at(RENAME, "link", AT_FDCWD, to) ? -1 : real(from, to);
}

int unlink(const char *path)
{
    REAL(unlink);
    return fails_at(UNLINK, "unlink", AT_FDCWD, path) ? -1 : real(path);
}

int unlinkat(int folder, const char *path, int flags)
{
    REAL(unlinkat);
    return fails_at(UNLINK, "unlink", folder, path) ? -1 : real(folder, path, flags);
}

int rmdir(const char *path)
{
    REAL(rmdir);
    return fails_at(UNLINK, "rmdir", AT_FDCWD, path) ? -1 : real(path);
}

int mkdir(const char *path, mode_t mode)
{
    REAL(mkdir);
    return fails_at(MKDIR, "mkdir", AT_FDCWD, path) ? -1 : real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode)
{
    REAL(mkdirat);
    return fails_at(MKDIR, "mkdir", folder, path) ? -1 : real(folder, path, mode);
}
