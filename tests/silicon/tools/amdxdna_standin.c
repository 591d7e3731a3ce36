/* Stand-in for the amdxdna kernel driver: LD_PRELOAD answers its DRM ioctls from user space.
 *
 * AMD's own pyxrt, XRT and NPU user driver run on top of it unchanged; nothing is computed. The device node is a
 * sparse regular file, and the mmap offset of a buffer object is its offset in that file, so mmap() is the real one.
 * Written against the public header of linux-libc-dev.
 *
 * Environment, read at every call so that a test can change it:
 *   FX_STATE=N         final ert_cmd_state of every command (default 4, COMPLETED)
 *   FX_DELAY_MS=N      time until a command is done; negative: never
 *   FX_FAIL=NR:ERRNO   the ioctl with that number (hexadecimal) fails with that errno
 *   FX_MAX_CONTEXTS=N  hardware contexts that can be open at the same time (default: no limit)
 *   FX_LOG=FILE        append one line per buffer, per context created or destroyed and per command
 *   FX_DEBUG=1         print every ioctl to stderr
 */
#define _GNU_SOURCE
#include <drm/amdxdna_accel.h>
#include <drm/drm.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MEMORY_BYTES ((size_t)8 << 30)
#define HEAP_BYTES ((uint64_t)64 << 20)
#define HEAP_ADDRESS 0x4000000ull
#define LARGEST_BO (1ull << 32)
#define PAGE 4096ull
#define NO_ADDRESS (~0ull)
#define SLOTS 65536
#define STATE_MASK 0xfu
#define STATE_COMPLETED 4
#define POLL_US 1000
#define NR_GEM_CLOSE 0x09
#define NR_SYNCOBJ_CREATE 0xBF
#define NR_SYNCOBJ_DESTROY 0xC0

struct buffer { uint32_t type; uint64_t offset, size, address; };
struct command { uint64_t done_at_ms; uint32_t handle; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *memory;
static struct buffer buffers[SLOTS];
static struct command commands[SLOTS];
static uint32_t next_handle = 1;
static uint64_t top, heap_offset, heap_used, sequence;
static uint32_t next_context;
static int open_contexts;

static int fail(int error) { errno = error; return -1; }

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? strtol(text, NULL, 10) : otherwise;
}

static uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000ull + t.tv_nsec / 1000000;
}

static void note(const char *what, unsigned long number) {
    const char *path = getenv("FX_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) { fprintf(file, "%s %lu\n", what, number); fclose(file); }
}

static int map_memory(int fd) {
    if (memory) return 0;
    if (ftruncate(fd, MEMORY_BYTES)) return -1;
    void *mapped = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (mapped == MAP_FAILED) return -1;
    memory = mapped;
    return 0;
}

static int create_bo(struct amdxdna_drm_create_bo *request) {
    uint64_t size = (request->size + PAGE - 1) & ~(PAGE - 1);
    if (request->vaddr) return fail(EOPNOTSUPP);
    if (request->size > LARGEST_BO || next_handle >= SLOTS) return fail(ENOMEM);
    struct buffer made = {request->type, top, request->size, NO_ADDRESS};
    if (request->type == AMDXDNA_BO_DEV) {
        if (heap_used + size > HEAP_BYTES) return fail(EAGAIN);
        made.address = HEAP_ADDRESS + heap_used;
        made.offset = heap_offset + heap_used;
        heap_used += size;
    } else {
        if (request->type == AMDXDNA_BO_DEV_HEAP) {
            top = (top + HEAP_BYTES - 1) & ~(HEAP_BYTES - 1);
            made.offset = heap_offset = top;
            made.address = HEAP_ADDRESS;
        }
        if (top + size > MEMORY_BYTES) return fail(ENOMEM);
        top += size;
    }
    buffers[next_handle] = made;
    note("buffer", next_handle);
    request->handle = next_handle++;
    return 0;
}

static int bo_info(struct amdxdna_drm_get_bo_info *request) {
    struct buffer *bo = &buffers[request->handle % SLOTS];
    request->map_offset = bo->type == AMDXDNA_BO_DEV ? NO_ADDRESS : bo->offset;
    request->xdna_addr = bo->address;
    request->vaddr = NO_ADDRESS;
    return 0;
}

static int create_context(struct amdxdna_drm_create_hwctx *request) {
    long limit = setting("FX_MAX_CONTEXTS", -1);
    if (limit >= 0 && open_contexts >= limit) return fail(EINVAL);
    open_contexts++;
    request->handle = ++next_context;
    request->syncobj_handle = 0;
    request->umq_doorbell = ~0u;
    note("context", request->handle);
    return 0;
}

static int destroy_context(struct amdxdna_drm_destroy_hwctx *request) {
    open_contexts--;
    note("close", request->handle);
    return 0;
}

/* The first word of a command buffer holds the state in its low bits. */
static void set_state(uint32_t handle) {
    volatile uint32_t *header = (void *)(memory + buffers[handle].offset);
    *header = (*header & ~STATE_MASK) | (uint32_t)setting("FX_STATE", STATE_COMPLETED);
}

static int submit(struct amdxdna_drm_exec_cmd *request) {
    uint32_t handle = (uint32_t)request->cmd_handles;
    long delay = setting("FX_DELAY_MS", 0);
    request->seq = ++sequence;
    struct command *command = &commands[sequence % SLOTS];
    command->handle = handle;
    command->done_at_ms = delay < 0 ? UINT64_MAX : now_ms() + (uint64_t)delay;
    note("command", sequence);
    if (delay == 0) set_state(handle);
    return 0;
}

static int wait_for(struct amdxdna_drm_wait_cmd *request) {
    struct command *command = &commands[request->seq % SLOTS];
    uint64_t limit = request->timeout ? now_ms() + request->timeout : UINT64_MAX;
    for (;;) {
        uint64_t now = now_ms();
        if (now >= command->done_at_ms) { set_state(command->handle); return 0; }
        if (now >= limit) return fail(ETIME);
        usleep(POLL_US);
    }
}

static int get_info(struct amdxdna_drm_get_info *request) {
    void *answer = (void *)(uintptr_t)request->buffer;
    memset(answer, 0, request->buffer_size);
    if (request->param == DRM_AMDXDNA_QUERY_AIE_METADATA) {
        struct amdxdna_drm_query_aie_metadata *array = answer;
        array->cols = 8;
        array->rows = 6;
        array->version.major = 2;
        array->core.row_count = 4;
        array->core.row_start = 2;
        array->mem.row_count = 1;
        array->mem.row_start = 1;
        array->shim.row_count = 1;
    } else if (request->param == DRM_AMDXDNA_QUERY_AIE_VERSION) {
        ((struct amdxdna_drm_query_aie_version *)answer)->major = 2;
    } else if (request->param == DRM_AMDXDNA_QUERY_FIRMWARE_VERSION) {
        *(uint32_t *)answer = 1;
    }
    return 0;
}

static int must_fail(unsigned number, int *error) {
    const char *text = getenv("FX_FAIL");
    unsigned which;
    return text && sscanf(text, "%x:%d", &which, error) == 2 && which == number;
}

static int answer(unsigned number, void *data) {
    switch (number) {
    case DRM_COMMAND_BASE + DRM_AMDXDNA_CREATE_BO: return create_bo(data);
    case DRM_COMMAND_BASE + DRM_AMDXDNA_GET_BO_INFO: return bo_info(data);
    case DRM_COMMAND_BASE + DRM_AMDXDNA_CREATE_HWCTX: return create_context(data);
    case DRM_COMMAND_BASE + DRM_AMDXDNA_DESTROY_HWCTX: return destroy_context(data);
    case DRM_COMMAND_BASE + DRM_AMDXDNA_EXEC_CMD: return submit(data);
    case DRM_COMMAND_BASE + DRM_AMDXDNA_GET_INFO: return get_info(data);
    case DRM_COMMAND_BASE + DRM_AMDXDNA_GET_ARRAY:
        ((struct amdxdna_drm_get_array *)data)->num_element = 0;
        return 0;
    case NR_SYNCOBJ_CREATE:
        ((struct drm_syncobj_create *)data)->handle = 1;
        return 0;
    case DRM_COMMAND_BASE + DRM_AMDXDNA_SYNC_BO:
    case DRM_COMMAND_BASE + DRM_AMDXDNA_CONFIG_HWCTX:
    case DRM_COMMAND_BASE + DRM_AMDXDNA_SET_STATE:
    case NR_GEM_CLOSE:
    case NR_SYNCOBJ_DESTROY:
        return 0;
    }
    return fail(EOPNOTSUPP);
}

static int drm_ioctl(int fd, unsigned long request, void *data) {
    unsigned number = _IOC_NR(request);
    int error;
    if (getenv("FX_DEBUG")) fprintf(stderr, "[stand-in] ioctl 0x%x\n", number);
    if (map_memory(fd)) return -1;
    if (must_fail(number, &error)) return fail(error);
    if (number == DRM_COMMAND_BASE + DRM_AMDXDNA_WAIT_CMD) return wait_for(data); /* sleeps: without the lock */
    pthread_mutex_lock(&lock);
    int result = answer(number, data);
    pthread_mutex_unlock(&lock);
    return result;
}

int ioctl(int fd, unsigned long request, ...) {
    va_list rest;
    va_start(rest, request);
    void *data = va_arg(rest, void *);
    va_end(rest);
    if (_IOC_TYPE(request) == DRM_IOCTL_BASE) return drm_ioctl(fd, request, data);
    return (int)syscall(SYS_ioctl, fd, request, data);
}
