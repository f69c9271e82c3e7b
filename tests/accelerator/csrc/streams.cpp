// Devices, streams, events and generators of the test device, as torch's interfaces for accelerators ask for them.
#include "device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/TensorBase.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace lagomtest {
namespace {

void at_once(const Task& call) { call(); }

std::atomic<bool> has_started{false};
std::atomic<bool> is_bad_fork{false};
std::atomic<bool> is_synchronizing_forbidden{false};
std::atomic<uint64_t> synchronized_count{0};
thread_local c10::DeviceIndex current = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

// A queue of late tasks. Tasks are counted, so that an event is a number.
struct Queue {
    std::recursive_mutex running;  // held while a task runs; a task may drain its own stream
    std::mutex mutex;
    std::deque<Task> tasks;
    uint64_t num_added = 0;
    std::atomic<uint64_t> num_done{0};
};

struct Event {
    std::shared_ptr<Queue> queue;
    uint64_t number = 0;
    std::chrono::steady_clock::time_point time;
};

std::mutex queues_mutex;
std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::shared_ptr<Queue>> queues;
std::atomic<c10::StreamId> next_stream{1};

std::shared_ptr<Queue> queue_of(const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(queues_mutex);
    auto& queue = queues[{stream.device_index(), stream.id()}];
    if (!queue) queue = std::make_shared<Queue>();
    return queue;
}

// Runs tasks until ``number`` of them are done. One thread runs at a time; the others wait for it.
void run_until(Queue& queue, uint64_t number) {
    while (queue.num_done < number) {
        std::unique_lock<std::recursive_mutex> running(queue.running, std::try_to_lock);
        if (!running) without_gil([&] { running.lock(); });
        Task task;
        {
            std::lock_guard<std::mutex> lock(queue.mutex);
            if (queue.num_done >= number || queue.tasks.empty()) return;  // empty: this thread runs one of them
            task = std::move(queue.tasks.front());
            queue.tasks.pop_front();
        }
        struct Done {  // also of a task that fails
            Queue& queue;
            ~Done() { ++queue.num_done; }
        } done{queue};
        task();
    }
}

uint64_t num_added(Queue& queue) {
    std::lock_guard<std::mutex> lock(queue.mutex);
    return queue.num_added;
}

void add(Queue& queue, Task task) {
    std::lock_guard<std::mutex> lock(queue.mutex);
    queue.tasks.push_back(std::move(task));
    ++queue.num_added;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kType; }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before(kType, current);
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override { return {kType, current}; }
    void setDevice(c10::Device device) const override { set_device(device.index()); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
    c10::Stream getStream(c10::Device device) const override {
        return current_stream(device.has_index() ? device.index() : current);
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return c10::Stream(c10::Stream::DEFAULT, indexed(device));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return c10::Stream(c10::Stream::UNSAFE, indexed(device), next_stream++);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        const c10::Stream before = current_stream(stream.device_index());
        current_streams[stream.device_index()] = stream.id();
        return before;
    }
    void* getStreamNativeHandle(const c10::Stream stream) const override { return queue_of(stream).get(); }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (*event == nullptr) *event = new Event;
        auto queue = queue_of(stream);
        const uint64_t number = num_added(*queue);
        *static_cast<Event*>(*event) = {queue, number, std::chrono::steady_clock::now()};
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event == nullptr) return;
        const Event awaited = *static_cast<Event*>(event);
        auto queue = queue_of(stream);
        if (awaited.queue != queue && awaited.queue->num_done < awaited.number) {
            add(*queue, [awaited] { run_until(*awaited.queue, awaited.number); });
        }
    }
    // An event that a program asks for again and again comes to its end, though not at the first time.
    bool queryEvent(void* event) const override {
        if (event == nullptr) return true;
        auto& asked = *static_cast<Event*>(event);
        if (asked.queue->num_done >= asked.number) return true;
        run_until(*asked.queue, asked.number);
        return false;
    }
    c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
    bool queryStream(const c10::Stream& stream) const override {
        if (num_pending(stream) == 0) return true;
        drain(stream);
        return false;
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        synchronizes("Stream.synchronize");
        drain(stream);
    }
    void synchronizeEvent(void* event) const override {
        synchronizes("Event.synchronize");
        if (event != nullptr) run_until(*static_cast<Event*>(event)->queue, static_cast<Event*>(event)->number);
    }
    void synchronizeDevice(const c10::DeviceIndex index) const override {
        synchronizes("synchronize");
        drain_device(index < 0 ? current : index);
    }
    double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
        const auto passed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
        return std::chrono::duration<double, std::milli>(passed).count();
    }

private:
    static c10::Device indexed(c10::Device device) { return {kType, device.has_index() ? device.index() : current}; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Has a generator of the CPU draw, from another place than the CPU's with the same seed.
struct DeviceGenerator final : c10::GeneratorImpl {
    explicit DeviceGenerator(c10::DeviceIndex index)
        : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          state(std::make_shared<State>()) {
        DeviceGenerator::set_current_seed(c10::default_rng_seed_val);
    }
    void set_current_seed(uint64_t seed) override {
        state->seed = seed;
        state->inner.set_current_seed((seed ^ 0x6C61676F6DULL) * 0x9E3779B97F4A7C15ULL >> 16);
    }
    void set_offset(uint64_t) override { TORCH_CHECK(false, "a generator of lagomtest has no offset"); }
    uint64_t get_offset() const override { TORCH_CHECK(false, "a generator of lagomtest has no offset"); }
    uint64_t current_seed() const override { return state->seed; }
    uint64_t seed() override {
        set_current_seed(c10::detail::getNonDeterministicRandom());
        return state->seed;
    }
    // The state is the seed and the state of the CPU's generator.
    void set_state(const c10::TensorImpl& found) override {
        TORCH_CHECK(found.device().is_cpu() && found.dtype() == c10::kByte, "a state is a ByteTensor on the CPU");
        TORCH_CHECK(found.is_contiguous() && found.numel() > int64_t(sizeof(uint64_t)), "a state of another generator");
        const auto* bytes = static_cast<const uint8_t*>(found.data());
        auto rest = at::detail::empty_cpu({found.numel() - int64_t(sizeof(uint64_t))}, c10::kByte);
        std::memcpy(rest.mutable_data_ptr(), bytes + sizeof(uint64_t), rest.nbytes());
        state->inner.set_state(*rest.unsafeGetTensorImpl());
        std::memcpy(&state->seed, bytes, sizeof(uint64_t));
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        auto rest = state->inner.get_state();
        auto whole = at::detail::empty_cpu({rest->numel() + int64_t(sizeof(uint64_t))}, c10::kByte);
        auto* bytes = static_cast<uint8_t*>(whole.mutable_data_ptr());
        std::memcpy(bytes, &state->seed, sizeof(uint64_t));
        std::memcpy(bytes + sizeof(uint64_t), rest->data(), rest->numel());
        return whole.getIntrusivePtr();
    }
    void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
        auto* generator = dynamic_cast<DeviceGenerator*>(other.get());
        TORCH_CHECK(generator != nullptr, "not a generator of lagomtest");
        state = generator->state;
    }
    c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
        auto found = c10::make_intrusive<DeviceGenerator>(device().index());
        found->state = state;
        return found;
    }
    at::Generator drawing() const { return at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(&state->inner)); }

protected:
    DeviceGenerator* clone_impl() const override {
        auto* copy = new DeviceGenerator(device().index());
        copy->set_state(*get_state());
        return copy;
    }

private:
    // Shared by generators after graphsafe_set_state, as CUDA's.
    struct State {
        uint64_t seed = 0;
        at::CPUGeneratorImpl& inner;
        c10::intrusive_ptr<at::CPUGeneratorImpl> owner;
        State() : State(c10::make_intrusive<at::CPUGeneratorImpl>()) {}
        explicit State(c10::intrusive_ptr<at::CPUGeneratorImpl> made) : inner(*made), owner(std::move(made)) {}
    };
    std::shared_ptr<State> state;
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return device_count() > 0; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
        return default_generator(index < 0 ? current : index);
    }
    at::Generator getNewGenerator(c10::DeviceIndex index) const override {
        return new_generator(index < 0 ? current : index);
    }
    at::Device getDeviceFromPtr(void*) const override { return {kType, current}; }
    bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialized(); }
    void init() const override { initialize(); }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
        auto* impl = storage.unsafeGetStorageImpl();
        TORCH_CHECK(impl->resizable(), "this storage cannot be resized");
        const c10::Device before = Guard().exchangeDevice(impl->device());
        c10::DataPtr memory = device_allocator()->allocate(size);
        Guard().setDevice(before);
        if (size > 0 && impl->nbytes() > 0) std::memcpy(memory.get(), impl->data(), std::min(size, impl->nbytes()));
        impl->set_data_ptr_noswap(std::move(memory));
        impl->set_nbytes(size);
    }
    c10::DeviceIndex deviceCount() const override { return device_count(); }
    void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
    c10::DeviceIndex getCurrentDevice() const override { return current; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        const c10::DeviceIndex before = current;
        if (index >= 0) set_device(index);
        return before;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
};

struct Registration {
    Registration() {
        at::RegisterPrivateUse1HooksInterface(new Hooks);
        pthread_atfork(nullptr, nullptr, [] { is_bad_fork = has_started.load(); });
    }
} registration;

}  // namespace

void (*without_gil)(const Task&) = &at_once;

// As many as the mask names, else as LAGOMTEST_NUM_DEVICES says, else two.
c10::DeviceIndex device_count() {
    const char* mask = std::getenv("LAGOMTEST_VISIBLE_DEVICES");
    if (mask == nullptr) {
        const char* number = std::getenv("LAGOMTEST_NUM_DEVICES");
        return c10::DeviceIndex(number != nullptr ? std::atoi(number) : 2);
    }
    return *mask == '\0' ? 0 : c10::DeviceIndex(1 + std::count(mask, mask + std::strlen(mask), ','));
}

c10::DeviceIndex current_device() { return current; }

void set_device(c10::DeviceIndex index) {
    TORCH_CHECK(index >= 0 && index < device_count(), "lagomtest has no device ", int(index), ", but ", int(device_count()));
    current = index;
}

bool in_bad_fork() { return is_bad_fork; }
bool is_initialized() { return has_started && !is_bad_fork; }

void initialize() {
    TORCH_CHECK(
        !is_bad_fork, "Cannot re-initialize lagomtest in forked subprocess. To use lagomtest with multiprocessing, you "
        "must use the 'spawn' start method");
    has_started = true;
}

c10::Stream current_stream(c10::DeviceIndex index) {
    auto found = current_streams.find(index);
    const c10::StreamId id = found == current_streams.end() ? 0 : found->second;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
}

void enqueue(const c10::Stream& stream, Task task) { add(*queue_of(stream), std::move(task)); }

void drain(const c10::Stream& stream) {
    auto queue = queue_of(stream);
    run_until(*queue, num_added(*queue));
}

void drain_device(c10::DeviceIndex index) {
    std::vector<std::shared_ptr<Queue>> found;
    {
        std::lock_guard<std::mutex> lock(queues_mutex);
        for (auto& [key, queue] : queues) {
            if (key.first == index) found.push_back(queue);
        }
    }
    for (auto& queue : found) run_until(*queue, num_added(*queue));
}

size_t num_pending(const c10::Stream& stream) {
    auto queue = queue_of(stream);
    return num_added(*queue) - queue->num_done;
}

void synchronizes(const char* what) {
    ++synchronized_count;
    TORCH_CHECK(!is_synchronizing_forbidden, "called a synchronizing lagomtest operation: ", what);
}

void forbid_synchronizing(bool is_forbidden) { is_synchronizing_forbidden = is_forbidden; }
uint64_t num_synchronized() { return synchronized_count; }

at::Generator new_generator(c10::DeviceIndex index) { return at::make_generator<DeviceGenerator>(index); }

const at::Generator& default_generator(c10::DeviceIndex index) {
    static const std::vector<at::Generator> generators = [] {
        std::vector<at::Generator> made;
        for (c10::DeviceIndex i = 0; i < kMostDevices; ++i) made.push_back(new_generator(i));
        return made;
    }();
    return generators.at(index);
}

at::Generator drawing(const at::Generator& generator) {
    TORCH_CHECK(
        generator.device().type() == kType, "Expected a 'lagomtest' device type for generator but found '",
        c10::DeviceTypeName(generator.device().type(), true), "'");
    return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->drawing();
}

}  // namespace lagomtest
