// A driver for machines without a device: the functions of libcuda that kvferry calls, over host memory.
//
// Streams are queues that run when somebody waits for them, and not before: whatever is given back,
// overwritten or launched too early gives a wrong result every time. Kernels are the emulated ones, and
// touch only what their device could. Devices 0 and 1 can access each other's memory, device 2 is alone.
// What a real driver does only once the device has come to it waits here, too: giving memory back, and
// copying from host to host.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace emulated {

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
    bool is_managed = false;  // seen by all
};

struct Function {
    int kernel;
    int most_shared_bytes = 48 << 10;
};

inline std::recursive_mutex lock;
inline Context contexts[DEVICES] = {{0, {0}}, {1, {1}}, {2, {2}}};
inline bool can_access[DEVICES][DEVICES] = {{true}, {false, true}, {false, false, true}};
inline std::map<uint64_t, Memory> memories;
inline Result failure = SUCCESS;  // sticky, as a device's is
inline int global_captures = 0;  // begun by any thread
inline uint64_t num_launches = 0;
inline std::vector<Stream*> streams = {&contexts[0].default_stream, &contexts[1].default_stream, &contexts[2].default_stream};
inline uint64_t num_events = 0;
inline uint64_t num_questions = 0;
inline uint64_t calls_before_fault = 0;  // until the one that fails, of those that can; 0: none does
inline int version = 13000;
inline int capability = 9;

inline thread_local std::vector<Context*> current;
inline thread_local int own_captures = 0;  // begun by this thread
inline thread_local uint32_t capture_mode = 0;  // but for the relaxed one, what a capture cannot repeat is refused
inline thread_local int kernel_device = 0;

// Memory that has so many bytes from there on; where it begins.
const Memory* find(uint64_t address, uint64_t num_bytes, uint64_t* begin = nullptr);
// Whether the device whose kernel runs can access so many bytes.
bool is_accessible(uint64_t address, uint64_t num_bytes);

// The stream that a handle names, of the current context where it is a default one.
Stream* resolve(void* handle);
// Runs what is enqueued, or no more of it than an event needs.
void run(Stream* stream, const Event* until = nullptr, uint64_t due = 0);
// As calls do that the whole device is waited for.
void run_all();
Result enqueue(void* handle, Operation operation);
// What a call answers that no capture can repeat.
Result refuse_while_capturing();

// Whether this is the call that has to fail.
bool fails();

}  // namespace emulated

#define DRIVER(name) extern "C" __attribute__((visibility("default"))) Result name
#define LOCKED std::lock_guard<std::recursive_mutex> locked(lock)
