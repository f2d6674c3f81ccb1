// Devices of the emulated driver: contexts, kernels, and launches of them.

#include <cstring>

#include "../kernels.hpp"
#include "driver.hpp"

using namespace emulated;

namespace {

template <class Parameters>
Operation launch(uint64_t (*kernel)(const Parameters*, const Grid*), void** parameters, Grid grid, int device) {
    const Parameters copied = *static_cast<const Parameters*>(parameters[0]);
    return {[=] {
        ++num_launches;
        kernel_device = device;
        kvferry_emulated_check_accesses(is_accessible);
        // Every kernel's first parameter is a table.
        const bool is_fine = is_accessible(*reinterpret_cast<const uint64_t*>(&copied), 1);
        const Grid order = {grid.blocks, grid.threads, static_cast<uint32_t>(num_launches % 2)};
        if (!is_fine || kernel(&copied, &order) > 0) failure = ILLEGAL_ADDRESS;
        kvferry_emulated_check_accesses(nullptr);
    }};
}

}  // namespace

DRIVER(cuGetErrorName)(Result result, const char** name) {
    *name = result == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OF_EMULATION";
    return SUCCESS;
}
DRIVER(cuInit)(uint32_t) { return SUCCESS; }
DRIVER(cuDriverGetVersion)(int* answer) { *answer = version; return SUCCESS; }
DRIVER(cuDeviceGetCount)(int* count) { *count = DEVICES; return SUCCESS; }
DRIVER(cuDeviceGet)(int* device, int ordinal) { *device = ordinal; return SUCCESS; }
DRIVER(cuDeviceGetAttribute)(int* value, int attribute, int) {
    switch (attribute) {
        case 16: *value = MULTIPROCESSORS; return SUCCESS;
        case 75: *value = capability; return SUCCESS;
        case 76: *value = 0; return SUCCESS;
        case 97: *value = MOST_SHARED_BYTES; return SUCCESS;
        default: return INVALID_VALUE;
    }
}
DRIVER(cuDevicePrimaryCtxRetain)(Context** context, int device) { *context = &contexts[device]; return SUCCESS; }
DRIVER(cuCtxPushCurrent_v2)(Context* context) { current.push_back(context); return SUCCESS; }
DRIVER(cuCtxPopCurrent_v2)(Context** context) {
    if (current.empty()) return INVALID_CONTEXT;
    *context = current.back();
    current.pop_back();
    return SUCCESS;
}
DRIVER(cuCtxGetDevice)(int* device) {
    if (current.empty()) return INVALID_CONTEXT;
    *device = current.back()->device;
    return SUCCESS;
}
DRIVER(cuDeviceCanAccessPeer)(int* can, int device, int peer) { *can = device < 2 && peer < 2; return SUCCESS; }
DRIVER(cuCtxEnablePeerAccess)(Context* peer, uint32_t) {
    LOCKED;
    bool& access = can_access[current.back()->device][peer->device];
    if (access) return PEER_ACCESS_ALREADY_ENABLED;
    access = true;
    return SUCCESS;
}

DRIVER(cuModuleLoadData)(void** module, const void* image) {
    LOCKED;
    if (const Result refused = refuse_while_capturing()) return refused;
    *module = &contexts;
    return *static_cast<const uint32_t*>(image) == 0xBA55ED50 ? SUCCESS : INVALID_IMAGE;
}
DRIVER(cuModuleGetFunction)(Function** function, void*, const char* name) {
    const char* const names[] = {"kvferry_copy_loops", "kvferry_copy_runs", "kvferry_transpose"};
    for (int kernel = 0; kernel < 3; ++kernel) {
        if (std::strcmp(name, names[kernel]) == 0) {
            *function = new Function{kernel};
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}
DRIVER(cuFuncSetAttribute)(Function* function, int attribute, int value) {
    if (attribute != 8 || value > MOST_SHARED_BYTES) return INVALID_VALUE;
    function->most_shared_bytes = value;
    return SUCCESS;
}
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, Function*, int, size_t shared_bytes) {
    *blocks = shared_bytes <= MOST_SHARED_BYTES ? BLOCKS_AT_ONCE : 0;
    return SUCCESS;
}
DRIVER(cuLaunchKernel)(Function* function, uint32_t blocks, uint32_t y, uint32_t z, uint32_t threads, uint32_t, uint32_t,
                       uint32_t shared_bytes, void* stream, void** parameters, void**) {
    LOCKED;
    if (current.empty()) return INVALID_CONTEXT;
    if (fails()) return OUT_OF_MEMORY;
    if (blocks == 0 || y != 1 || z != 1 || shared_bytes > static_cast<uint32_t>(function->most_shared_bytes)) {
        return INVALID_VALUE;
    }
    const Grid grid = {blocks, threads, 0};
    const int device = current.back()->device;
    switch (function->kernel) {
        case 0: return enqueue(stream, launch(kvferry_emulated_copy_loops, parameters, grid, device));
        case 1: return enqueue(stream, launch(kvferry_emulated_copy_runs, parameters, grid, device));
        default: return enqueue(stream, launch(kvferry_emulated_transpose, parameters, grid, device));
    }
}
