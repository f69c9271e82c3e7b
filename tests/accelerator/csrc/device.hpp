// The test device "lagomtest": memory, streams and generators of several devices that are parts of this process.
//
// Note [A late device]
//
// Kernels run at once, in the calling thread. Copies with non_blocking=True and exchanges between ranks are late: they
// wait in the queue of their stream, and run when something that comes after them needs it, in that thread: the next
// kernel on the same stream, a stream that waits for their event, or a synchronize. So a program that reads without
// such an order always reads the numbers from before, and not just where a machine is slow.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <ATen/core/Generator.h>

#include <cstdint>
#include <functional>

namespace lagomtest {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

constexpr c10::DeviceIndex kMostDevices = 16;

// Devices.
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex index);
bool in_bad_fork();
bool is_initialized();
// Throws in a process that was forked from one which has used the device.
void initialize();

// Memory.
size_t allocated_bytes(c10::DeviceIndex index);
size_t peak_bytes(c10::DeviceIndex index);
void reset_peak(c10::DeviceIndex index);
size_t total_bytes(c10::DeviceIndex index);
void set_total_bytes(c10::DeviceIndex index, size_t total);
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
// Takes over memory of the CPU as a device's; throws OutOfMemoryError, as an allocation does.
c10::DataPtr adopt(c10::DataPtr memory, size_t size, c10::DeviceIndex index);

// Streams.
using Task = std::function<void()>;
c10::Stream current_stream(c10::DeviceIndex index);
void enqueue(const c10::Stream& stream, Task task);
// Runs what waits in a stream's queue. See Note [A late device].
void drain(const c10::Stream& stream);
void drain_device(c10::DeviceIndex index);
size_t num_pending(const c10::Stream& stream);
// Runs a call that waits for another thread, which may need Python's lock.
extern void (*without_gil)(const Task&);

// Called by what makes the host wait for a device; throws if a test has forbidden it.
void synchronizes(const char* what);
void forbid_synchronizing(bool is_forbidden);
uint64_t num_synchronized();

// Generators.
const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
// The generator of the CPU that draws a device's numbers.
at::Generator drawing(const at::Generator& generator);

}  // namespace lagomtest
