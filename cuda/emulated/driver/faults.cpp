// What tests ask of the emulated driver, and of no other: to fail, to be another, and what it has counted.

#include "driver.hpp"

using namespace emulated;

#define TESTS(Result, name) extern "C" __attribute__((visibility("default"))) Result name

namespace emulated {

bool fails() { return calls_before_fault > 0 && --calls_before_fault == 0; }

}  // namespace emulated

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
