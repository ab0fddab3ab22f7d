/* The driver (libcuda), NVML and nvrtc of the imaginary card. torch opens all three by name when it needs them.
   Numbers of attributes and the head of CUmemAllocationProp: CUDA Driver API 13.0. */
#include "imaginary.h"
#include <string.h>

Status cudaDeviceGetAttribute(int *out, int attribute, int device);
Status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *function, int threads, size_t shared);
Status cudaGetDevice(int *out);

Status cuInit(unsigned flags) { return visible_cards() ? SUCCESS : NO_DEVICE; }
Status cuDriverGetVersion(int *out) { return *out = 13000, SUCCESS; }
Status cuDeviceGet(int *out, int index) { return *out = index, SUCCESS; }
Status cuDeviceGetCount(int *out) { return *out = visible_cards(), SUCCESS; }
Status cuDeviceGetAttribute(int *out, int attribute, int device) {
    enum { VIRTUAL_MEMORY = 102 };
    return attribute == VIRTUAL_MEMORY ? (*out = 1, SUCCESS) : cudaDeviceGetAttribute(out, attribute, device);
}
Status cuDeviceGetUuid(void *out, int device) { return memset(out, device + 1, 16), SUCCESS; }
Status cuCtxGetCurrent(void **out) { return *out = (void *)16, SUCCESS; }
Status cuCtxSetCurrent(void *context) { return SUCCESS; }
Status cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, SUCCESS; }
Status cuDevicePrimaryCtxRetain(void **out, int device) { return *out = (void *)16, SUCCESS; }
Status cuGetErrorString(Status code, const char **out) { return *out = code ? "an error of the imaginary card" : "no error", SUCCESS; }
Status cuGetErrorName(Status code, const char **out) { return *out = code ? "CUDA_ERROR" : "CUDA_SUCCESS", SUCCESS; }
Status cuPointerGetAttribute(void *out, int attribute, uint64_t address) { return INVALID_VALUE; }

/* Virtual memory, for expandable segments: addresses and memory are taken apart. */
typedef struct { size_t bytes; int device; } Physical;
typedef struct { int kind, handle_kinds, location_kind, device; } AllocationProperties;
Status cuMemGetAllocationGranularity(size_t *out, const void *properties, int option) { return *out = GRAIN, SUCCESS; }
Status cuMemAddressReserve(uint64_t *out, size_t bytes, size_t alignment, uint64_t address, uint64_t flags) {
    int device = 0;
    cudaGetDevice(&device);
    *out = (uint64_t)reserve(bytes, device);
    return *out ? SUCCESS : OUT_OF_MEMORY;
}
Status cuMemAddressFree(uint64_t address, size_t bytes) { return give_back((void *)address) ? SUCCESS : INVALID_VALUE; }
Status cuMemCreate(uint64_t *out, size_t bytes, const AllocationProperties *properties, uint64_t flags) {
    if (take(properties->device, bytes)) return OUT_OF_MEMORY;
    Physical *memory = new_handle();
    *memory = (Physical){bytes, properties->device};
    return *out = (uint64_t)memory, SUCCESS;
}
Status cuMemRelease(uint64_t handle) {
    Physical *memory = (Physical *)handle;
    release(memory->device, memory->bytes);
    memory->bytes = 0;
    return SUCCESS;
}

Status cuMemMap(void) { return SUCCESS; }
Status cuMemUnmap(void) { return SUCCESS; }
Status cuMemSetAccess(void) { return SUCCESS; }

/* Kernels that torch compiles when they are first used. */
Status cuModuleLoadData(void **out, const void *image) { return *out = (void *)32, SUCCESS; }
Status cuModuleLoadDataEx(void **out, const void *image, unsigned n, void *names, void *options) { return *out = (void *)32, SUCCESS; }
Status cuModuleGetFunction(void **out, void *module, const char *name) { return *out = (void *)48, SUCCESS; }
Status cuFuncGetAttribute(int *out, int attribute, void *function) { return *out = attribute == 0 ? 1024 : 32, SUCCESS; }
Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, void *function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(out, function, threads, shared);
}
Status nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, SUCCESS; }
Status nvrtcGetPTXSize(void *program, size_t *out) { return *out = 1, SUCCESS; }
Status nvrtcGetCUBINSize(void *program, size_t *out) { return *out = 1, SUCCESS; }
Status nvrtcGetProgramLogSize(void *program, size_t *out) { return *out = 1, SUCCESS; }
Status nvrtcGetPTX(void *program, char *out) { return *out = 0, SUCCESS; }
Status nvrtcGetCUBIN(void *program, char *out) { return *out = 0, SUCCESS; }
Status nvrtcGetProgramLog(void *program, char *out) { return *out = 0, SUCCESS; }
Status nvrtcGetLoweredName(void *program, const char *name, const char **out) { return *out = "kernel", SUCCESS; }
const char *nvrtcGetErrorString(Status code) { return code ? "an error of the imaginary card" : "no error"; }

/* NVML counts every card, whatever CUDA_VISIBLE_DEVICES says. */
enum { NVML_NOT_SUPPORTED = 3 };
Status nvmlInit(void) { return SUCCESS; }
Status nvmlInit_v2(void) { return SUCCESS; }
Status nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(Status code) { return code ? "not supported by the imaginary card" : "success"; }
Status nvmlDeviceGetCount_v2(unsigned *out) { return *out = (unsigned)card.count, SUCCESS; }
Status nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { return *out = (void *)(uintptr_t)(index + 1), SUCCESS; }
Status nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) { return *out = (void *)1, SUCCESS; }
Status nvmlDeviceGetUUID(void *device, char *out, unsigned size) { return NVML_NOT_SUPPORTED; }
Status nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *out) { return NVML_NOT_SUPPORTED; }
Status nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *out) { return NVML_NOT_SUPPORTED; }
Status nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *out) { return *count = 0, SUCCESS; }
Status nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *out) { return *count = 0, SUCCESS; }
Status nvmlSystemGetCudaDriverVersion_v2(int *out) { return *out = 13000, SUCCESS; }
/* nvmlGpuFabricInfoV_t behind its version: no fabric. */
Status nvmlDeviceGetGpuFabricInfoV(void *device, char *out) { return memset(out + 4, 0, 25), SUCCESS; }
