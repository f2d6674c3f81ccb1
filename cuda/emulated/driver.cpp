// A driver for machines without a device: the functions of libcuda that kvferry calls, over host memory.
//
// Streams are queues that run when somebody waits for them, and not before: whatever is given back,
// overwritten or launched too early gives a wrong result every time. Kernels are the emulated ones, and
// touch only what their device could. Devices 0 and 1 can access each other's memory, device 2 is alone.
// What a real driver does only once the device has come to it waits here, too: giving memory back, and
// copying from host to host.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kvferry/copy_loops.cuh"
#include "kvferry/copy_runs.cuh"
#include "kvferry/transpose.cuh"

struct Grid {
    uint32_t blocks;
    uint32_t threads;
    uint32_t is_backward;
};
extern "C" uint64_t kvferry_emulated_copy_loops(const kvferry::CopyLoops* copy, const Grid* grid);
extern "C" uint64_t kvferry_emulated_copy_runs(const kvferry::CopyRuns* copy, const Grid* grid);
extern "C" uint64_t kvferry_emulated_transpose(const kvferry::Transpose* how, const Grid* grid);
void kvferry_emulated_check_accesses(bool (*check)(uint64_t address, uint64_t num_bytes));

namespace {

enum Result : uint32_t {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_ISOLATION = 905,
};

constexpr int DEVICES = 3;
constexpr int MULTIPROCESSORS = 3;
constexpr int BLOCKS_AT_ONCE = 2;
constexpr int MOST_SHARED_BYTES = 99 << 10;
constexpr uint64_t PAGE_BYTES = 4096;

struct Stream;

struct Event {
    Stream* recorded_on = nullptr;
    uint64_t due = 0;   // records so far
    uint64_t past = 0;  // records that the stream has come to
};

struct Operation {
    std::function<void()> run;
    Event* waits_for = nullptr;
    uint64_t due = 0;
};

using Graph = std::vector<Operation>;

struct Stream {
    int device;
    std::deque<Operation> queue = {};
    Graph* capture = nullptr;
    bool is_global = false;
    uint64_t id = 0;
};

// A device's primary context, with its default stream.
struct Context {
    int device;
    Stream default_stream;
};

// Memory of a device, or of the host (-1), which devices see at another address or at the same.
struct Memory {
    uint64_t num_bytes;
    int device;
    uint64_t seen_at;
    bool is_pooled = false;  // its device gives no other access
};

struct Function {
    int kernel;
    int most_shared_bytes = 48 << 10;
};

std::recursive_mutex lock;
Context contexts[DEVICES] = {{0, {0}}, {1, {1}}, {2, {2}}};
bool can_access[DEVICES][DEVICES] = {{true}, {false, true}, {false, false, true}};
std::map<uint64_t, Memory> memories;
Result failure = SUCCESS;  // sticky, as a device's is
int global_captures = 0;  // begun by any thread
uint64_t num_launches = 0;
std::vector<Stream*> streams = {&contexts[0].default_stream, &contexts[1].default_stream, &contexts[2].default_stream};
uint64_t num_events = 0;
uint64_t num_questions = 0;
uint64_t calls_before_fault = 0;  // until the one that fails, of those that can; 0: none does
int version = 13000;
int capability = 9;

thread_local std::vector<Context*> current;
thread_local int own_captures = 0;  // begun by this thread
thread_local uint32_t capture_mode = 0;  // but for the relaxed one, what a capture cannot repeat is refused
thread_local int kernel_device = 0;

const Memory* find(uint64_t address, uint64_t num_bytes, uint64_t* begin = nullptr) {
    auto after = memories.upper_bound(address);
    if (after == memories.begin()) return nullptr;
    const auto& [first, memory] = *std::prev(after);
    if (address + num_bytes > first + memory.num_bytes) return nullptr;
    if (begin) *begin = first;
    return &memory;
}

bool can_see(const Memory& memory, uint64_t begin, int device) {
    if (memory.device < 0) return memory.seen_at == 0 || memory.seen_at == begin;
    return memory.device == device || (can_access[device][memory.device] && !memory.is_pooled);
}

// Whether the device whose kernel runs can access so many bytes.
bool is_accessible(uint64_t address, uint64_t num_bytes) {
    static thread_local uint64_t known_begin = 1, known_end = 0;
    static thread_local uint64_t known_launch = 0;
    if (known_launch == num_launches && known_begin <= address && address + num_bytes <= known_end) return true;
    uint64_t begin = 0;
    const Memory* memory = find(address, num_bytes, &begin);
    // The host's memory is seen by devices only where it is mapped for them.
    const bool is_fine = memory && can_see(*memory, begin, kernel_device);
    if (is_fine) {
        known_begin = begin, known_end = begin + memory->num_bytes, known_launch = num_launches;
    }
    return is_fine;
}

// Runs what is enqueued, or no more of it than an event needs.
void run(Stream* stream, const Event* until = nullptr, uint64_t due = 0) {
    while (!stream->queue.empty() && !(until && until->past >= due)) {
        Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        if (operation.waits_for && operation.waits_for->past < operation.due) {
            run(operation.waits_for->recorded_on, operation.waits_for, operation.due);
        }
        if (operation.run) operation.run();
    }
}

// As calls do that the whole device is waited for.
void run_all() {
    for (Stream* stream : streams) {
        if (!stream->capture) run(stream);
    }
}

// Whether this is the call that has to fail.
bool fails() { return calls_before_fault > 0 && --calls_before_fault == 0; }

Stream* resolve(void* handle) {
    const auto number = reinterpret_cast<uintptr_t>(handle);
    if (number > 2) return static_cast<Stream*>(handle);
    return current.empty() ? nullptr : &current.back()->default_stream;
}

Result enqueue(void* handle, Operation operation) {
    Stream* stream = resolve(handle);
    if (!stream || current.empty() || current.back()->device != stream->device) return INVALID_CONTEXT;
    if (stream->capture) {
        stream->capture->push_back(std::move(operation));
    } else {
        stream->queue.push_back(std::move(operation));
    }
    return failure;
}

Result refuse_while_capturing() {
    return global_captures + own_captures > 0 && capture_mode != 2 ? STREAM_CAPTURE_UNSUPPORTED : SUCCESS;
}

uint64_t map_pages(uint64_t num_bytes, int file) {
    void* pages = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, file, 0);
    return pages == MAP_FAILED ? 0 : reinterpret_cast<uint64_t>(pages);
}

uint64_t in_pages(uint64_t num_bytes) { return (num_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

Result allocate(uint64_t* address, uint64_t num_bytes) {
    if (current.empty()) return INVALID_CONTEXT;
    *address = num_bytes > 0 && num_bytes < 1ull << 40 ? map_pages(in_pages(num_bytes), -1) : 0;
    if (!*address) return OUT_OF_MEMORY;
    memories[*address] = {num_bytes, current.back()->device, 0};
    return SUCCESS;
}

// What is known of an address; false where nothing is.
bool tell(void* answer, int attribute, uint64_t address) {
    uint64_t begin = 0;
    const Memory* memory = find(address, 1, &begin);
    if (!memory) return false;
    const bool is_host = memory->device < 0;
    switch (attribute) {
        case 2: *static_cast<uint32_t*>(answer) = is_host ? 1 : 2; return true;
        case 3: *static_cast<uint64_t*>(answer) = address - begin + (is_host ? memory->seen_at : begin); return true;
        case 8: *static_cast<bool*>(answer) = false; return true;
        case 9: *static_cast<int*>(answer) = is_host ? 0 : memory->device; return true;
        case 10: *static_cast<int*>(answer) = !is_host && !memory->is_pooled; return true;
        case 11: *static_cast<uint64_t*>(answer) = begin; return true;
        case 12: *static_cast<size_t*>(answer) = memory->num_bytes; return true;
        case 16:
            *static_cast<uint32_t*>(answer) = can_see(*memory, begin, current.back()->device) ? 3 : 0;
            return true;
        default: return false;
    }
}

void release(uint64_t address) {
    auto found = memories.find(address);
    if (found == memories.end()) return;
    munmap(reinterpret_cast<void*>(address), in_pages(found->second.num_bytes));
    memories.erase(found);
}

void copy(uint64_t target, uint64_t source, uint64_t num_bytes) {
    // The copy engine reaches devices' memory, and pinned memory at either of its addresses.
    if (!find(target, num_bytes) || !find(source, num_bytes)) {
        failure = ILLEGAL_ADDRESS;
        return;
    }
    std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), num_bytes);
}

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

#define DRIVER(name) extern "C" __attribute__((visibility("default"))) Result name
#define LOCKED std::lock_guard<std::recursive_mutex> locked(lock)

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

DRIVER(cuStreamCreate)(Stream** stream, uint32_t) {
    if (current.empty()) return INVALID_CONTEXT;
    LOCKED;
    *stream = new Stream{current.back()->device};
    (*stream)->id = streams.size();
    streams.push_back(*stream);
    return SUCCESS;
}
DRIVER(cuStreamDestroy_v2)(Stream* stream) {
    LOCKED;
    run(stream);
    for (Stream*& known : streams) {
        if (known == stream) known = &contexts[stream->device].default_stream;
    }
    delete stream;
    return SUCCESS;
}
DRIVER(cuStreamGetId)(void* stream, unsigned long long* id) {
    LOCKED;
    Stream* known = resolve(stream);
    *id = known->id > 0 ? known->id : known->device;
    return SUCCESS;
}
DRIVER(cuStreamGetCtx)(void* stream, Context** context) {
    *context = &contexts[static_cast<Stream*>(stream)->device];
    return SUCCESS;
}
DRIVER(cuStreamSynchronize)(void* stream) {
    LOCKED;
    if (const Result refused = refuse_while_capturing()) return refused;
    run(resolve(stream));
    return failure;
}
DRIVER(cuStreamWaitEvent)(void* stream, Event* event, uint32_t) {
    LOCKED;
    if (resolve(stream)->capture) return STREAM_CAPTURE_ISOLATION;
    if (fails()) return OUT_OF_MEMORY;
    return enqueue(stream, {nullptr, event, event->due});
}
DRIVER(cuEventCreate)(Event** event, uint32_t) {
    LOCKED;
    if (fails()) return OUT_OF_MEMORY;
    ++num_events;
    *event = new Event;
    return SUCCESS;
}
DRIVER(cuEventRecord)(Event* event, void* stream) {
    LOCKED;
    if (fails()) return OUT_OF_MEMORY;
    event->recorded_on = resolve(stream);
    const uint64_t due = ++event->due;
    return enqueue(stream, {[=] { event->past = due; }});
}
DRIVER(cuEventQuery)(Event* event) {
    LOCKED;
    if (const Result refused = refuse_while_capturing()) return refused;
    return event->past < event->due ? NOT_READY : failure;
}

DRIVER(cuThreadExchangeStreamCaptureMode)(uint32_t* mode) { std::swap(*mode, capture_mode); return SUCCESS; }
DRIVER(cuStreamIsCapturing)(void* stream, uint32_t* status) {
    LOCKED;
    *status = resolve(stream)->capture ? 1 : 0;
    return SUCCESS;
}
DRIVER(cuStreamBeginCapture_v2)(Stream* stream, uint32_t mode) {
    LOCKED;
    stream->capture = new Graph;
    stream->is_global = mode == 0;
    ++(stream->is_global ? global_captures : own_captures);
    return SUCCESS;
}
DRIVER(cuStreamEndCapture)(Stream* stream, Graph** graph) {
    LOCKED;
    *graph = std::exchange(stream->capture, nullptr);
    --(stream->is_global ? global_captures : own_captures);
    return SUCCESS;
}
DRIVER(cuGraphInstantiateWithFlags)(Graph** executable, Graph* graph, unsigned long long) {
    *executable = graph;
    return SUCCESS;
}
DRIVER(cuGraphLaunch)(Graph* graph, Stream* stream) {
    LOCKED;
    stream->queue.insert(stream->queue.end(), graph->begin(), graph->end());
    return failure;
}

DRIVER(cuMemAlloc_v2)(uint64_t* address, size_t num_bytes) {
    LOCKED;
    if (const Result refused = refuse_while_capturing()) return refused;
    if (fails()) return OUT_OF_MEMORY;
    return allocate(address, num_bytes);
}
DRIVER(cuMemFree_v2)(uint64_t address) {
    LOCKED;
    run_all();
    release(address);
    return SUCCESS;
}
DRIVER(cuMemHostAlloc)(void** memory, size_t num_bytes, uint32_t) {
    LOCKED;
    if (const Result refused = refuse_while_capturing()) return refused;
    if (fails()) return OUT_OF_MEMORY;
    const uint64_t pages = in_pages(num_bytes);
    const int file = memfd_create("pinned", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(pages)) != 0) return OUT_OF_MEMORY;
    const uint64_t on_host = map_pages(pages, file), on_device = map_pages(pages, file);
    close(file);
    memories[on_host] = {num_bytes, -1, on_device};
    memories[on_device] = {num_bytes, -1, 0};
    *memory = reinterpret_cast<void*>(on_host);
    return SUCCESS;
}
DRIVER(cuMemHostRegister_v2)(void* memory, size_t num_bytes, uint32_t) {
    LOCKED;
    const auto address = reinterpret_cast<uint64_t>(memory);
    memories[address] = {num_bytes, -1, address};
    return SUCCESS;
}
DRIVER(cuMemFreeHost)(void* memory) {
    LOCKED;
    run_all();
    const auto address = reinterpret_cast<uint64_t>(memory);
    release(memories[address].seen_at);
    release(address);
    return SUCCESS;
}
DRIVER(cuMemAllocAsync)(uint64_t* address, size_t num_bytes, void*) {
    LOCKED;
    if (fails()) return OUT_OF_MEMORY;
    const Result result = allocate(address, num_bytes);
    if (result == SUCCESS) memories[*address].is_pooled = true;
    return result;
}
DRIVER(cuMemFreeAsync)(uint64_t address, void* stream) {
    LOCKED;
    return enqueue(stream, {[=] { release(address); }});
}
DRIVER(cuPointerGetAttribute)(void* answer, int attribute, uint64_t address) {
    LOCKED;
    return tell(answer, attribute, address) ? SUCCESS : INVALID_VALUE;
}
DRIVER(cuPointerGetAttributes)(uint32_t count, int* attributes, void** answers, uint64_t address) {
    LOCKED;
    if (fails()) return OUT_OF_MEMORY;
    ++num_questions;
    for (uint32_t index = 0; index < count; ++index) {
        tell(answers[index], attributes[index], address);
    }
    return SUCCESS;
}
DRIVER(cuMemcpyAsync)(uint64_t target, uint64_t source, size_t num_bytes, void* stream) {
    LOCKED;
    if (fails()) return OUT_OF_MEMORY;
    const Memory *from = find(source, 1), *to = find(target, 1);
    const bool is_on_host = from && to && from->device < 0 && to->device < 0;
    const Result result = enqueue(stream, {[=] { copy(target, source, num_bytes); }});
    if (is_on_host && !resolve(stream)->capture) run(resolve(stream));
    return result;
}
DRIVER(cuMemcpyHtoDAsync_v2)(uint64_t target, const void* source, size_t num_bytes, void* stream) {
    return cuMemcpyAsync(target, reinterpret_cast<uint64_t>(source), num_bytes, stream);
}

namespace {

// Taken from the driver by its version.
Result copy_batch(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count, const uint32_t* attributes,
                  size_t* first, size_t num_attributes, void* stream) {
    LOCKED;
    const bool is_default = reinterpret_cast<uintptr_t>(stream) <= 2;
    if (is_default || num_attributes != 1 || first[0] != 0 || attributes[0] != 1) return INVALID_VALUE;
    if (resolve(stream)->capture) return STREAM_CAPTURE_UNSUPPORTED;
    if (fails()) return INVALID_VALUE;
    for (size_t piece = 0; piece < count; ++piece) {
        const Result result = cuMemcpyAsync(targets[piece], sources[piece], sizes[piece], stream);
        if (result) return result;
    }
    return SUCCESS;
}

}  // namespace

DRIVER(cuGetProcAddress_v2)(const char* name, void** function, int version, uint64_t, uint32_t*) {
    const bool is_known = std::strcmp(name, "cuMemcpyBatchAsync") == 0 && version == 13000;
    *function = is_known ? reinterpret_cast<void*>(&copy_batch) : nullptr;
    return is_known ? SUCCESS : NOT_FOUND;
}

// What tests ask of it, and of no other driver.
#define TESTS(Result, name) extern "C" __attribute__((visibility("default"))) Result name

// Has the call fail that comes so many calls later, of those that can fail; 0: none.
TESTS(void, kvferry_emulated_fail)(uint64_t calls) { calls_before_fault = calls; }
// Whether the call that had to fail has.
TESTS(bool, kvferry_emulated_has_failed)() { return calls_before_fault == 0; }
// Events that were ever made.
TESTS(uint64_t, kvferry_emulated_events)() { return num_events; }
// Questions about memory that were ever asked.
TESTS(uint64_t, kvferry_emulated_questions)() { return num_questions; }
// Bytes of all memory that is allocated now.
TESTS(uint64_t, kvferry_emulated_bytes)() {
    LOCKED;
    uint64_t bytes = 0;
    for (const auto& [begin, memory] : memories) bytes += memory.num_bytes;
    return bytes;
}
// Has it be another driver, of devices of another age, before it is started.
TESTS(void, kvferry_emulated_pretend)(int driver_version, int major_capability) {
    version = driver_version;
    capability = major_capability;
}
