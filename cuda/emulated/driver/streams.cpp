// Streams of the emulated driver: queues, the events between them, and graphs that are captured.

#include "driver.hpp"

using namespace emulated;

namespace emulated {

void run(Stream* stream, const Event* until, uint64_t due) {
    while (!stream->queue.empty() && !(until && until->past >= due)) {
        Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        if (operation.waits_for && operation.waits_for->past < operation.due) {
            run(operation.waits_for->recorded_on, operation.waits_for, operation.due);
        }
        if (operation.run) operation.run();
    }
}

void run_all() {
    for (Stream* stream : streams) {
        if (!stream->capture) run(stream);
    }
}

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

}  // namespace emulated

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

DRIVER(cuThreadExchangeStreamCaptureMode)(uint32_t* mode) {
    if (current.empty()) return INVALID_CONTEXT;
    std::swap(*mode, capture_mode);
    return SUCCESS;
}
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
