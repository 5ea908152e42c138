/* A disk whose reads fail, for LD_PRELOAD: reads past the page cache are simulated on any file system, and a control block in
   shared memory selects the fault of the n-th read. The machine seems to have 8 kB of memory, so that no data stay in its page cache.

   ACTSHARD_DISK names the file of the control block. Only files in the folder that it names are concerned. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { NONE, FAILS, INVALID, SHORT_BLOCKS, SHORT_BYTES, EMPTY, INTERRUPTED, KILLED, TRUNCATED, REFUSED };
enum { DIRECT = 1, CACHED = 2, BLOCK = 4096, MOST = 65536 };

/* The layout is that of `Control` in disk.py. */
struct control {
    int64_t fault, which, first, last, length;
    int64_t number, direct, cached, unaligned, hit;
    char folder[4096];
};

static struct control *control;
static volatile char direct_files[MOST];
static int (*real_open)(const char *, int, ...);
static int (*real_close)(int);
static ssize_t (*real_pread)(int, void *, size_t, off_t);

__attribute__((constructor)) static void begin(void) {
    real_open = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    real_close = (int (*)(int))dlsym(RTLD_NEXT, "close");
    real_pread = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread64");
    const char *name = getenv("ACTSHARD_DISK");
    int fd = name ? real_open(name, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *at = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    control = at == MAP_FAILED ? NULL : at;
    real_close(fd);
}

static int opens(const char *path, int flags, mode_t mode) {
    if (control && strcmp(path, "/proc/meminfo") == 0) {
        static const char text[] = "MemTotal: 8 kB\n";
        int fd = memfd_create("meminfo", MFD_CLOEXEC);
        if (fd >= 0 && write(fd, text, sizeof text - 1) > 0)
            lseek(fd, 0, SEEK_SET);
        return fd;
    }
    int direct = control && (flags & O_DIRECT);
    if (direct && control->fault == REFUSED) {
        __atomic_add_fetch(&control->hit, 1, __ATOMIC_SEQ_CST);
        errno = EINVAL;
        return -1;
    }
    int fd = real_open(path, direct ? flags & ~O_DIRECT : flags, mode);
    if (fd >= 0 && fd < MOST)
        direct_files[fd] = direct;
    return fd;
}

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list list;                                                                                                  \
        va_start(list, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;                                        \
        va_end(list);                                                                                                  \
        return opens(path, flags, mode);                                                                               \
    }
OPEN(open)
OPEN(open64)

int close(int fd) {
    if (fd >= 0 && fd < MOST)
        direct_files[fd] = 0;
    return real_close(fd);
}

static int path_of(int fd, char *path, size_t size) {
    char link[64] = "/proc/self/fd/", digits[16];
    int n = 0;
    do
        digits[n++] = (char)('0' + fd % 10);
    while ((fd /= 10) > 0);
    char *to = link + strlen(link);
    while (n > 0)
        *to++ = digits[--n];
    ssize_t len = readlink(link, path, size - 1);
    if (len < 0)
        return 0;
    path[len] = 0;
    return 1;
}

static ssize_t reads(int fd, void *into, size_t len, off_t at) {
    char path[4096];
    if (!control || !path_of(fd, path, sizeof path) || strncmp(path, control->folder, strlen(control->folder)) != 0)
        return real_pread(fd, into, len, at);
    int which = fd < MOST && direct_files[fd] ? DIRECT : CACHED;
    if (which == DIRECT && ((uintptr_t)into % BLOCK || len % BLOCK || at % BLOCK)) {
        __atomic_add_fetch(&control->unaligned, 1, __ATOMIC_SEQ_CST);
        errno = EINVAL;
        return -1;
    }
    __atomic_add_fetch(which == DIRECT ? &control->direct : &control->cached, 1, __ATOMIC_SEQ_CST);
    /* Bytes that a failed or short read leaves behind are undefined. */
    memset(into, 0xa5, len);
    int64_t now = control->which & which ? __atomic_add_fetch(&control->number, 1, __ATOMIC_SEQ_CST) : 0;
    if (control->fault == NONE || now == 0 || now < control->first || now > control->last)
        return real_pread(fd, into, len, at);
    __atomic_add_fetch(&control->hit, 1, __ATOMIC_SEQ_CST);
    switch (control->fault) {
    case FAILS: errno = EIO; return -1;
    case INVALID: errno = EINVAL; return -1;
    case INTERRUPTED: errno = EINTR; return -1;
    case EMPTY: return 0;
    case SHORT_BLOCKS: return real_pread(fd, into, len < 2 * BLOCK ? len : len / 2 / BLOCK * BLOCK, at);
    case SHORT_BYTES: return real_pread(fd, into, len / 2 + 1, at);
    case KILLED: raise(SIGKILL); return -1;
    case TRUNCATED:
        if (lseek(fd, 0, SEEK_END) > control->length && truncate(path, control->length) != 0)
            return -1;
        return real_pread(fd, into, len, at);
    default: return real_pread(fd, into, len, at);
    }
}

ssize_t pread(int fd, void *into, size_t len, off_t at) { return reads(fd, into, len, at); }
ssize_t pread64(int fd, void *into, size_t len, off64_t at) { return reads(fd, into, len, at); }
