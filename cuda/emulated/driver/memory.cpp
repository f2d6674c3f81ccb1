// Memory of the emulated driver: what is allocated, who sees it, and copies of it.

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "driver.hpp"

using namespace emulated;

namespace {

bool can_see(const Memory& memory, uint64_t begin, int device) {
    if (memory.is_managed) return true;
    if (memory.device < 0) return memory.seen_at == 0 || memory.seen_at == begin;
    return memory.device == device || (can_access[device][memory.device] && !memory.is_pooled);
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
        case 7: *static_cast<uint64_t*>(answer) = begin; return true;
        case 8: *static_cast<bool*>(answer) = memory->is_managed; return true;
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

}  // namespace

namespace emulated {

const Memory* find(uint64_t address, uint64_t num_bytes, uint64_t* begin) {
    auto after = memories.upper_bound(address);
    if (after == memories.begin()) return nullptr;
    const auto& [first, memory] = *std::prev(after);
    if (address + num_bytes > first + memory.num_bytes) return nullptr;
    if (begin) *begin = first;
    return &memory;
}

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

}  // namespace emulated

DRIVER(cuMemAlloc_v2)(uint64_t* address, size_t num_bytes) {
    LOCKED;
    if (const Result refused = refuse_while_capturing()) return refused;
    if (fails()) return OUT_OF_MEMORY;
    return allocate(address, num_bytes);
}
DRIVER(cuMemAllocManaged)(uint64_t* address, size_t num_bytes, uint32_t) {
    LOCKED;
    const Result result = allocate(address, num_bytes);
    if (result == SUCCESS) memories[*address].is_managed = true;
    return result;
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

// The same as it was in CUDA 12.8.
Result copy_earlier_batch(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count, const uint32_t* attributes,
                          size_t* first, size_t num_attributes, size_t* failed, void* stream) {
    return failed ? copy_batch(targets, sources, sizes, count, attributes, first, num_attributes, stream) : INVALID_VALUE;
}

}  // namespace

DRIVER(cuGetProcAddress_v2)(const char* name, void** function, int asked, uint64_t, uint32_t*) {
    const bool is_known = std::strcmp(name, "cuMemcpyBatchAsync") == 0 && 12080 <= asked && asked <= version;
    *function = !is_known        ? nullptr
                : asked < 13000 ? reinterpret_cast<void*>(&copy_earlier_batch)
                                : reinterpret_cast<void*>(&copy_batch);
    return is_known ? SUCCESS : NOT_FOUND;
}
