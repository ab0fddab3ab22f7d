/* The CUDA runtime (libcudart) of the imaginary card. Layouts and numbers of attributes: CUDA Runtime API 13.0,
   "Data types used by CUDA Runtime" (structs cudaDeviceProp, cudaFuncAttributes, cudaPointerAttributes). */
#define _GNU_SOURCE
#include "imaginary.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

Card card;
static __thread int current;
static __thread Status last_error;

size_t setting(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

__attribute__((constructor(101))) static void read_settings(void) {
    const char *name = getenv("IMAGINARY_NAME");
    card = (Card){
        .name = name ? name : "imaginary card",
        .bytes = setting("IMAGINARY_BYTES", (size_t)80 << 30),
        .taken = setting("IMAGINARY_TAKEN", 0),
        .major = (int)setting("IMAGINARY_MAJOR", 8),
        .minor = (int)setting("IMAGINARY_MINOR", 0),
        .multiprocessors = (int)setting("IMAGINARY_MULTIPROCESSORS", 108),
        .shared_per_multiprocessor = (int)setting("IMAGINARY_SHARED_PER_MULTIPROCESSOR", 167936),
        .shared_per_block = (int)setting("IMAGINARY_SHARED_PER_BLOCK", 166912),
        .threads_per_multiprocessor = (int)setting("IMAGINARY_THREADS_PER_MULTIPROCESSOR", 2048),
        .blocks_per_multiprocessor = (int)setting("IMAGINARY_BLOCKS_PER_MULTIPROCESSOR", 32),
        .count = (int)setting("IMAGINARY_COUNT", 1),
        .trace = (int)setting("IMAGINARY_TRACE", 0),
        .cudnn_workspace = setting("IMAGINARY_CUDNN_WORKSPACE", 0),
        .cublaslt_workspace = setting("IMAGINARY_CUBLASLT_WORKSPACE", 0),
    };
}

/* CUDA_VISIBLE_DEVICES, read when CUDA starts: numbers up to the first that no card has. */
int visible_cards(void) {
    static int count = -1;
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (count >= 0) return count;
    if (!text) return count = card.count;
    for (count = 0; *text; count++) {
        char *end;
        long index = strtol(text, &end, 10);
        if (end == text || index < 0 || index >= card.count) break;
        text = *end == ',' ? end + 1 : "";
    }
    return count;
}

Status error(Status code) {
    if (code) last_error = code;
    return code;
}
Status cudaGetLastError(void) {
    Status code = last_error;
    last_error = SUCCESS;
    return code;
}
Status cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(Status code) {
    switch (code) {
        case SUCCESS: return "no error";
        case INVALID_VALUE: return "invalid argument";
        case OUT_OF_MEMORY: return "out of memory";
        case NO_DEVICE: return "no CUDA-capable device is detected";
        case INVALID_DEVICE: return "invalid device ordinal";
        case NOT_SUPPORTED: return "operation not supported";
        default: return "an error of the imaginary card";
    }
}
const char *cudaGetErrorName(Status code) { return code == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : code ? "cudaErrorUnknown" : "cudaSuccess"; }
Status imaginary_stub(const char *name) {
    if (card.trace && strncmp(name, "__cuda", 6)) fprintf(stderr, "imaginary card: %s\n", name);
    return SUCCESS;
}
void *new_handle(void) { return calloc(1, 256); }

/* ---- devices ---- */
Status cudaGetDeviceCount(int *count) { return *count = visible_cards(), *count ? SUCCESS : error(NO_DEVICE); }
Status cudaGetDevice(int *device) { return *device = current, SUCCESS; }
Status cudaSetDevice(int device) {
    if (device < 0 || device >= visible_cards()) return error(INVALID_DEVICE);
    current = device;
    return SUCCESS;
}
Status cudaDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
Status cudaRuntimeGetVersion(int *version) { return *version = 13000, SUCCESS; }
Status cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }
Status cudaDeviceGetPCIBusId(char *text, int size, int device) { return snprintf(text, size, "0000:%02x:00.0", device + 1), SUCCESS; }
Status cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, SUCCESS; }

typedef struct {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t memory, shared_per_block;
    int registers_per_block, warp;
    size_t pitch;
    int threads_per_block, block[3], grid[3];
    size_t constants;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
    int multiprocessors, integrated, maps_host_memory, textures_and_surfaces[39];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, copy_engines, unified_addressing, bus_width;
    int l2, persisting_l2, threads_per_multiprocessor, stream_priorities, l1[2];
    size_t shared_per_multiprocessor;
    int registers_per_multiprocessor, managed_memory, board[2], atomics[5], cooperative_launch;
    size_t shared_optin;
    int page_tables[2], blocks_per_multiprocessor, access_window;
    size_t shared_reserved;
    int host_register, sparse[3], memory_pools, rdma[3], pool_handles, deferred, ipc_events, cluster_launch, rest[64];
} Properties;
_Static_assert(sizeof(Properties) == 1008, "cudaDeviceProp of CUDA 13");

Status cudaGetDeviceProperties(Properties *out, int device) {
    if (device < 0 || device >= visible_cards()) return error(INVALID_DEVICE);
    *out = (Properties){
        .memory = card.bytes, .shared_per_block = 49152, .registers_per_block = 65536, .warp = 32, .pitch = 2147483647,
        .threads_per_block = 1024, .block = {1024, 1024, 64}, .grid = {2147483647, 65535, 65535}, .constants = 65536,
        .major = card.major, .minor = card.minor, .texture_alignment = 512, .texture_pitch_alignment = 32,
        .multiprocessors = card.multiprocessors, .maps_host_memory = 1, .concurrent_kernels = 1, .ecc = 1,
        .pci_bus = device + 1, .copy_engines = 3, .unified_addressing = 1, .bus_width = 5120, .l2 = 50 << 20,
        .threads_per_multiprocessor = card.threads_per_multiprocessor, .stream_priorities = 1,
        .shared_per_multiprocessor = card.shared_per_multiprocessor, .registers_per_multiprocessor = 65536,
        .managed_memory = 1, .cooperative_launch = 1, .shared_optin = card.shared_per_block,
        .blocks_per_multiprocessor = card.blocks_per_multiprocessor, .shared_reserved = 1024, .host_register = 1,
        .memory_pools = 1, .cluster_launch = card.major >= 9,
    };
    snprintf(out->name, sizeof out->name, "%s", card.name);
    memset(out->uuid, device + 1, sizeof out->uuid);
    return SUCCESS;
}
Status cudaDeviceGetAttribute(int *out, int attribute, int device) {
    if (device < 0 || device >= visible_cards()) return error(INVALID_DEVICE);
    switch (attribute) {
        case 1: case 2: case 3: *out = 1024; break; /* threads of a block, its x and y */
        case 4: *out = 64; break;
        case 5: *out = 2147483647; break; /* blocks of a grid in x, y, z */
        case 6: case 7: *out = 65535; break;
        case 8: *out = 49152; break;
        case 9: *out = 65536; break;
        case 10: *out = 32; break;
        case 12: case 82: *out = 65536; break; /* registers of a block, of a multiprocessor */
        case 16: *out = card.multiprocessors; break;
        case 38: *out = 50 << 20; break;
        case 39: *out = card.threads_per_multiprocessor; break;
        case 75: *out = card.major; break;
        case 76: *out = card.minor; break;
        case 81: *out = card.shared_per_multiprocessor; break;
        case 97: *out = card.shared_per_block; break;
        case 106: *out = card.blocks_per_multiprocessor; break;
        case 111: *out = 1024; break;
        case 31: case 41: case 78: case 83: case 95: case 99: case 115: *out = 1; break;
        case 120: *out = card.major >= 9; break;
        default: *out = 0;
    }
    return SUCCESS;
}

/* ---- memory ---- */
Status cudaMalloc(void **out, size_t bytes) {
    size_t whole = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    *out = NULL;
    if (!bytes) return SUCCESS;
    if (take(current, whole)) return error(OUT_OF_MEMORY);
    if (!(*out = reserve(whole, current))) release(current, whole);
    return *out ? SUCCESS : error(OUT_OF_MEMORY);
}
Status cudaFree(void *address) {
    if (!address) return SUCCESS;
    int device = device_of(address);
    size_t bytes = device < 0 ? 0 : give_back(address);
    if (!bytes) return error(INVALID_VALUE);
    release(device, bytes);
    return SUCCESS;
}
Status cudaMallocAsync(void **out, size_t bytes, void *stream) { return cudaMalloc(out, bytes); }
Status cudaFreeAsync(void *address, void *stream) { return cudaFree(address); }
Status cudaMemGetInfo(size_t *out_free, size_t *out_total) { return *out_free = free_bytes(current), *out_total = card.bytes, SUCCESS; }
Status cudaDeviceGetDefaultMemPool(void **out, int device) { return *out = (void *)8, SUCCESS; }
Status cudaMemPoolGetAttribute(void *pool, int attribute, uint64_t *out) { return *out = card.bytes - card.taken - free_bytes(current), SUCCESS; }

/* Managed memory lies on the host until a kernel reads it, and no kernel runs. torch takes none; bitsandbytes pages by it. */
Status cudaHostAlloc(void **out, size_t bytes, unsigned flags);
Status cudaMallocManaged(void **out, size_t bytes, unsigned flags) { return cudaHostAlloc(out, bytes, flags); }
Status cudaMemPrefetchAsync(void) { return SUCCESS; }

/* Pinned memory is memory of the machine, in a list so that torch sees that it is pinned. */
typedef struct Pinned { struct Pinned *next; char *start; size_t bytes; } Pinned;
static Pinned *pinned;
static volatile int pinned_lock;
static void lock_pinned(void) { while (__sync_lock_test_and_set(&pinned_lock, 1)) {} }
static void unlock_pinned(void) { __sync_lock_release(&pinned_lock); }
static Status pin(void *start, size_t bytes) {
    Pinned *entry = malloc(sizeof *entry);
    *entry = (Pinned){NULL, start, bytes};
    lock_pinned();
    entry->next = pinned;
    pinned = entry;
    unlock_pinned();
    return SUCCESS;
}
static size_t unpin(void *start) {
    lock_pinned();
    Pinned **link = &pinned;
    while (*link && (*link)->start != start) link = &(*link)->next;
    Pinned *entry = *link;
    if (entry) *link = entry->next;
    unlock_pinned();
    size_t bytes = entry ? entry->bytes : 0;
    free(entry);
    return bytes;
}
static int is_pinned(const void *address) {
    lock_pinned();
    Pinned *entry = pinned;
    while (entry && !((char *)address >= entry->start && (char *)address < entry->start + entry->bytes)) entry = entry->next;
    unlock_pinned();
    return entry != NULL;
}
Status cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    size_t size = bytes ? bytes : 1;
    *out = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*out == MAP_FAILED) return *out = NULL, error(OUT_OF_MEMORY);
    return pin(*out, size);
}
Status cudaFreeHost(void *address) {
    size_t bytes = address ? unpin(address) : 0;
    if (bytes) munmap(address, bytes);
    return bytes || !address ? SUCCESS : error(INVALID_VALUE);
}
Status cudaHostRegister(void *address, size_t bytes, unsigned flags) { return is_pinned(address) ? error(ALREADY_REGISTERED) : pin(address, bytes); }
Status cudaHostUnregister(void *address) { return unpin(address) ? SUCCESS : error(NOT_REGISTERED); }
typedef struct { int kind, device; const void *on_card, *on_host; long rest[8]; } PointerAttributes;
Status cudaPointerGetAttributes(PointerAttributes *out, const void *address) {
    enum { UNREGISTERED, HOST, DEVICE };
    int device = device_of(address), kind = device >= 0 ? DEVICE : is_pinned(address) ? HOST : UNREGISTERED;
    *out = (PointerAttributes){kind, device >= 0 ? device : current, kind ? address : NULL, kind == DEVICE ? NULL : address, {0}};
    return SUCCESS;
}

Status cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return copy(to, from, bytes); }
Status cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) { return copy(to, from, bytes); }
Status cudaMemcpyPeerAsync(void *to, int device, const void *from, int peer, size_t bytes, void *stream) { return copy(to, from, bytes); }
Status cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream) {
    for (size_t row = 0; row < height; row++) copy(to + row * to_pitch, from + row * from_pitch, width);
    return SUCCESS;
}
Status cudaMemset(void *to, int value, size_t bytes) {
    if (device_of(to) < 0) return memset(to, value, bytes), SUCCESS;
    char line[64];
    memset(line, value, sizeof line);
    return copy(to, bytes <= sizeof line ? line : (char *)to + bytes, bytes);
}
Status cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) { return cudaMemset(to, value, bytes); }
Status cudaGetSymbolAddress(void **out, const void *symbol) {
    static char zeros[1 << 16];
    return *out = zeros, SUCCESS;
}
Status cudaIpcGetMemHandle(void) { return error(NOT_SUPPORTED); }
Status cudaIpcOpenMemHandle(void) { return error(NOT_SUPPORTED); }
Status cudaIpcGetEventHandle(void) { return error(NOT_SUPPORTED); }

/* ---- streams, events and graphs: all work is done when it is asked for; the clock is the machine's ---- */
typedef struct { int priority; unsigned long long capture; } Stream;
typedef struct { int64_t ns; } Event;
static unsigned long long n_captures;
static Stream *stream_of(void *handle) { return (uintptr_t)handle > 2 ? handle : NULL; } /* 0, 1, 2: default streams */
Status cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) { return *out = new_handle(), ((Stream *)*out)->priority = priority, SUCCESS; }
Status cudaStreamCreateWithFlags(void **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
Status cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }
Status cudaStreamGetPriority(void *stream, int *out) { return *out = stream_of(stream) ? stream_of(stream)->priority : 0, SUCCESS; }
Status cudaStreamIsCapturing(void *stream, int *out) { return *out = stream_of(stream) && stream_of(stream)->capture, SUCCESS; }
Status cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph, void **nodes, void **edges, size_t *n_nodes) {
    cudaStreamIsCapturing(stream, status);
    if (id) *id = *status ? stream_of(stream)->capture : 0;
    if (graph) *graph = NULL;
    if (n_nodes) *n_nodes = 0;
    return SUCCESS;
}
Status cudaStreamBeginCapture(void *stream, int mode) {
    if (!stream_of(stream)) return error(NOT_SUPPORTED);
    return stream_of(stream)->capture = __sync_add_and_fetch(&n_captures, 1), SUCCESS;
}
Status cudaStreamEndCapture(void *stream, void **graph) { return stream_of(stream)->capture = 0, *graph = new_handle(), SUCCESS; }
Status cudaGraphInstantiateWithFlags(void **out, void *graph, unsigned long long flags) { return *out = new_handle(), SUCCESS; }
Status cudaGraphGetNodes(void *graph, void **nodes, size_t *count) { return *count = 1, SUCCESS; }
Status cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) { return function(data), SUCCESS; }
Status cudaStreamAddCallback(void *stream, void (*function)(void *, Status, void *), void *data, unsigned flags) { return function(stream, SUCCESS, data), SUCCESS; }
Status cudaEventCreateWithFlags(void **out, unsigned flags) { return *out = new_handle(), SUCCESS; }
Status cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }
Status cudaEventDestroy(void *event) { return free(event), SUCCESS; }
Status cudaEventRecord(Event *event, void *stream) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->ns = now.tv_sec * 1000000000ll + now.tv_nsec;
    return SUCCESS;
}
Status cudaEventRecordWithFlags(Event *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
Status cudaEventElapsedTime(float *ms, Event *first, Event *last) {
    if (!first->ns || !last->ns) return error(INVALID_HANDLE);
    return *ms = (float)((double)(last->ns - first->ns) / 1e6), SUCCESS;
}

/* ---- kernels: counted, not run ---- */
static const void *conjunctions[256], *minima[256];
static int n_conjunctions, n_minima;
static Status launch(const void *kernel) {
    unsigned long number = __sync_add_and_fetch(&n_launches, 1);
    for (int i = 0; i < n_conjunctions; i++)
        if (conjunctions[i] == kernel) last_conjunction = number;
    for (int i = 0; i < n_minima; i++)
        if (minima[i] == kernel) last_minimum = number;
    return SUCCESS;
}
/* `all` and the product of two booleans, by which `isfinite` ends; and the minimum of a tensor. */
void __cudaRegisterFunction(void **binary, const void *kernel, char *stub, const char *name) {
    if (n_conjunctions < 256 && (strstr(name, "15and_kernel_cuda") || strstr(name, "10MulFunctorIbE")))
        conjunctions[n_conjunctions++] = kernel;
    if (n_minima < 256 && strstr(name, "13MinNanFunctorI")) minima[n_minima++] = kernel;
}
Status cudaLaunchKernel(const void *kernel) { return launch(kernel); }
Status __cudaLaunchKernel(const void *kernel) { return launch(kernel); }
Status cudaLaunchCooperativeKernel(const void *kernel) { return launch(kernel); }
Status cudaLaunchKernelExC(const void *settings, const void *kernel) { return launch(kernel); }
Status cuLaunchKernel(const void *kernel) { return launch(kernel); }
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[8];
    return handle;
}
char __cudaInitModule(void **handle) { return 1; }
Status __cudaGetKernel(const void **out, const void *function) { return *out = function, SUCCESS; }
typedef struct {
    size_t shared, constants, local;
    int threads_per_block, registers, ptx, binary, cache, dynamic_shared, rest[23];
} FunctionAttributes;
/* Torch's wheels have kernels for these (torch.cuda.get_arch_list, 2.11 and 2.13). A card runs the nearest lower ones,
   and cub refuses a version for which it was not compiled. */
static int compiled_for(int version) {
    static const int versions[] = {120, 100, 90, 86, 80, 75};
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++)
        if (versions[i] <= version) return versions[i];
    return 75;
}
Status cudaFuncGetAttributes(FunctionAttributes *out, const void *function) {
    int version = compiled_for(10 * card.major + card.minor);
    *out = (FunctionAttributes){.threads_per_block = 1024, .registers = 32, .ptx = version, .binary = version, .dynamic_shared = 49152};
    return SUCCESS;
}
/* Blocks of a kernel that takes 32 registers a thread: threads, shared memory and the number of blocks limit it. */
Status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *function, int threads, size_t shared) {
    int by_threads = card.threads_per_multiprocessor / (threads > 0 ? threads : 1);
    int by_shared = (int)((size_t)card.shared_per_multiprocessor / (shared + 1024));
    *out = by_threads < card.blocks_per_multiprocessor ? by_threads : card.blocks_per_multiprocessor;
    if (by_shared < *out) *out = by_shared;
    return SUCCESS;
}
Status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *function, int threads, size_t shared, unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(out, function, threads, shared);
}
static Status unsupported(void) { return NOT_SUPPORTED; }
Status cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags, int *status) {
    *out = dlsym(RTLD_DEFAULT, name);
    if (!*out) *out = (void *)unsupported;
    if (status) *status = SUCCESS;
    return SUCCESS;
}
