/* A fake CUDA runtime with eight devices for a machine without a driver. It creates streams and events and allocates host memory, but runs no kernels.
   Loaded before torch's runtime (LD_PRELOAD), it lets torch's device code run on tensors without data: see tests/gpu/fake_cuda.py. */
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES 8
#define MEMORY (80ull << 30)

static __thread int device;

cudaError_t cudaGetDeviceCount(int *count) { *count = DEVICES; return cudaSuccess; }
cudaError_t cudaGetDevice(int *now) { *now = device; return cudaSuccess; }
cudaError_t cudaSetDevice(int next) {
    if (next < 0 || next >= DEVICES) return cudaErrorInvalidDevice;
    device = next;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *all, int which) {
    memset(all, 0, sizeof *all);
    strcpy(all->name, "no device");
    all->major = 9;
    all->totalGlobalMem = MEMORY;
    all->multiProcessorCount = 132;
    all->warpSize = 32;
    all->maxThreadsPerBlock = 1024;
    all->maxThreadsPerMultiProcessor = 2048;
    all->pciBusID = which;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) { *value = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int which) { strncpy(text, "0000:00:00.0", length); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { *free = *total = MEMORY; return cudaSuccess; }

cudaError_t cudaMalloc(void **memory, size_t size) { return (*memory = malloc(size)) ? cudaSuccess : cudaErrorMemoryAllocation; }
cudaError_t cudaFree(void *memory) { free(memory); return cudaSuccess; }
cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags) { return cudaMalloc(memory, size); }
cudaError_t cudaFreeHost(void *memory) { return cudaFree(memory); }
cudaError_t cudaHostRegister(void *memory, size_t size, unsigned flags) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void *memory) { return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *all, const void *memory) {
    memset(all, 0, sizeof *all);
    return cudaSuccess;
}

/* Device memory is host memory here; constants are copied to it. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { memcpy(to, from, size); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemset(void *to, int value, size_t size) { memset(to, value, size); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { return cudaMemset(to, value, size); }

static void *something(void) { return malloc(1); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { *stream = something(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { *stream = something(); return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { free(stream); return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
    const cudaGraphEdgeData **edges, size_t *count
) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { *event = something(); return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) { *milliseconds = 0; return cudaSuccess; }

/* A device tensor with data is a mistake in the test, because nothing here can compute with it. */
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return cudaErrorNoKernelImageForDevice;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **args) { return cudaErrorNoKernelImageForDevice; }

/* The one function that torch calls in the driver's library: whether a device is in use. */
int cuDevicePrimaryCtxGetState(int which, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
