// Memory of the test device: the host's, counted for each device, and filled with NaN when it is new.
#include "device.hpp"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace lagomtest {
namespace {

constexpr size_t kAlignment = 64;
constexpr double kMiB = 1024.0 * 1024.0;

struct Usage {
    size_t allocated = 0;
    size_t peak = 0;
    size_t total = size_t{16} << 30;
    int64_t num_ooms = 0;
};

std::mutex mutex;
std::array<Usage, kMostDevices> usages;
std::map<uintptr_t, size_t> pinned;

Usage& usage_of(c10::DeviceIndex index) {
    TORCH_CHECK(index >= 0 && index < device_count(), "lagomtest has no device ", int(index));
    return usages[index];
}

void take(size_t size, c10::DeviceIndex index) {
    std::lock_guard<std::mutex> lock(mutex);
    Usage& usage = usage_of(index);
    if (usage.allocated + size > usage.total) {
        ++usage.num_ooms;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "lagomtest out of memory. Tried to allocate ", size / kMiB, " MiB. GPU ", int(index),
            " has a total capacity of ", usage.total / kMiB, " MiB of which ",
            (usage.total - std::min(usage.total, usage.allocated)) / kMiB, " MiB is free.");
    }
    usage.allocated += size;
    usage.peak = std::max(usage.peak, usage.allocated);
}

void give_back(size_t size, c10::DeviceIndex index) {
    std::lock_guard<std::mutex> lock(mutex);
    usages[index].allocated -= size;
}

void* new_memory(size_t size) {
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, kAlignment, std::max(size, kAlignment)) == 0, "the host is out of memory");
    std::memset(memory, 0xFF, size);  // NaN in each floating-point type
    return memory;
}

// What a DataPtr of the device holds: its own memory, or memory that a kernel of the CPU has allocated.
struct Block {
    c10::DataPtr adopted;
    void* own = nullptr;
    size_t size = 0;
    c10::DeviceIndex index = 0;
};

void free_block(void* context) {
    auto* block = static_cast<Block*>(context);
    give_back(block->size, block->index);
    std::free(block->own);
    delete block;
}

struct DeviceMemory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t size) override {
        initialize();
        const c10::DeviceIndex index = current_device();
        const c10::Device device(kType, index);
        if (size == 0) return {nullptr, device};
        take(size, index);
        auto* block = new Block{{}, new_memory(size), size, index};
        return {block->own, block, &free_block, device};
    }
    void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
    bool initialized() override { return is_initialized(); }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr&, c10::Stream) override {}  // late tasks hold their tensors
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
        std::lock_guard<std::mutex> lock(mutex);
        const Usage& usage = usage_of(index);
        c10::CachingDeviceAllocator::DeviceStats stats;
        for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
            (*bytes)[0].current = static_cast<int64_t>(usage.allocated);
            (*bytes)[0].peak = static_cast<int64_t>(usage.peak);
        }
        stats.num_ooms = usage.num_ooms;
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex index) override { reset_peak(index); }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
        std::lock_guard<std::mutex> lock(mutex);
        const Usage& usage = usage_of(index);
        return {usage.total - std::min(usage.total, usage.allocated), usage.total};
    }
};

void free_pinned(void* memory) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        pinned.erase(reinterpret_cast<uintptr_t>(memory));
    }
    std::free(memory);
}

struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        if (size == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
        void* memory = new_memory(size);
        std::lock_guard<std::mutex> lock(mutex);
        pinned[reinterpret_cast<uintptr_t>(memory)] = size;
        return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory);

}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(pointer));
    if (after == pinned.begin()) return false;
    const auto& [start, size] = *std::prev(after);
    return reinterpret_cast<uintptr_t>(pointer) < start + size;
}

c10::DataPtr adopt(c10::DataPtr memory, size_t size, c10::DeviceIndex index) {
    const c10::Device device(kType, index);
    if (memory.get() == nullptr || size == 0) return {nullptr, device};
    initialize();
    take(size, index);
    void* pointer = memory.get();
    return {pointer, new Block{std::move(memory), nullptr, size, index}, &free_block, device};
}

size_t allocated_bytes(c10::DeviceIndex index) {
    std::lock_guard<std::mutex> lock(mutex);
    return usage_of(index).allocated;
}

size_t peak_bytes(c10::DeviceIndex index) {
    std::lock_guard<std::mutex> lock(mutex);
    return usage_of(index).peak;
}

void reset_peak(c10::DeviceIndex index) {
    std::lock_guard<std::mutex> lock(mutex);
    usage_of(index).peak = usage_of(index).allocated;
}

size_t total_bytes(c10::DeviceIndex index) {
    std::lock_guard<std::mutex> lock(mutex);
    return usage_of(index).total;
}

void set_total_bytes(c10::DeviceIndex index, size_t total) {
    std::lock_guard<std::mutex> lock(mutex);
    usage_of(index).total = total;
}

}  // namespace lagomtest
