// lagom._native: the only file that includes Python. Buffers are passed by address and size; the callers in lagom/
// check that they have the right type and length.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "communicator.hpp"
#include "ring.hpp"
#include "twister.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using lagom::Communicator;
using lagom::Op;
using lagom::Type;

// Blocks a thread that Python ends while the thread acquires the GIL. Up to 3.13, an interpreter that shuts down
// unwinds the stacks of such threads, which would abort the process at the first function that is noexcept.
struct Stays {
    bool has_lock = false;
    ~Stays() noexcept(false) {
        while (!has_lock) pause();
    }
};

// Releases the GIL for the life of this object.
struct Unlocked {
    PyThreadState* const state = PyEval_SaveThread();
    Unlocked() = default;
    Unlocked(const Unlocked&) = delete;
    ~Unlocked() noexcept(false) {
        Stays here;
        PyEval_RestoreThread(state);
        here.has_lock = true;
    }
};
using Released = nb::call_guard<Unlocked>;

// Returns whether the handler of a signal has raised in Python. Python runs handlers in the main thread only, so other
// threads do not acquire the GIL here: that would end them when Python shuts down.
bool interrupted() {
    if (syscall(SYS_gettid) != getpid()) return false;
    const nb::gil_scoped_acquire held;
    return PyErr_CheckSignals() != 0;
}

void* at(uintptr_t address) { return reinterpret_cast<void*>(address); }
constexpr int BYTES = int(Type::u8);
Type type_of(int code) {
    if (code < 0 || code > int(Type::boolean)) throw lagom::Failure("no such type");
    return Type(code);
}
Op op_of(int code) {
    if (code < 0 || code > int(Op::bxor)) throw lagom::Failure("no such operation");
    return Op(code);
}

using Processes = std::vector<std::pair<int, uint64_t>>;
std::vector<lagom::Process> peers_of(const Processes& processes) {
    std::vector<lagom::Process> peers;
    for (const auto& [pid, since] : processes) peers.push_back({pid, since});
    return peers;
}

// Returns a new communicator, which Python owns.
Communicator* join(int fd, int rank, const Processes& processes, double timeout_s, double spin_s, int yields) {
    return new Communicator(fd, rank, peers_of(processes), lagom::Limits{timeout_s, spin_s, yields, interrupted});
}

// Holds the buffer of a Python object, such as a memoryview, for the life of this object.
struct Bytes {
    Py_buffer view{};
    ~Bytes() { PyBuffer_Release(&view); }
};

// Returns the head and body of each rank, as views of shared memory that are valid until the next call; for this rank
// only its head.
nb::list exchange(Communicator& self, nb::bytes head, nb::object body) {
    Bytes held;
    if (!body.is_none() && PyObject_GetBuffer(body.ptr(), &held.view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    const std::string_view given{static_cast<const char*>(held.view.buf), size_t(held.view.len)};
    const std::vector<lagom::Row>* rows;
    {
        const Unlocked released;
        rows = &self.exchange({head.c_str(), head.size()}, given);
    }
    nb::list found;
    for (int k = 0; k < self.size(); ++k) {
        if (k == self.rank()) {
            found.append(nb::steal(PyMemoryView_FromObject(head.ptr())));
        } else {
            char* const data = const_cast<char*>((*rows)[k].data);
            found.append(nb::steal(PyMemoryView_FromMemory(data, Py_ssize_t((*rows)[k].size), PyBUF_WRITE)));
        }
    }
    return found;
}

// The sections of a body that are averaged. Python keeps the object, so that later calls need not convert them again.
struct Sections {
    std::vector<lagom::Section> all;
    size_t size;
    Sections(const std::vector<std::tuple<size_t, size_t, int>>& given, size_t size)
        : size(size) {
        for (const auto& [start, count, type] : given) {
            const Type kind = type_of(type);
            if (kind > Type::bf16 || start > size || count > (size - start) / lagom::size_of(kind))
                throw lagom::Failure("a section is outside of its body, or not of floating point");
            all.push_back({start, count, kind});
        }
    }
};

// Returns the rows of the other ranks in the last exchange, valid until the next call; this rank's row is empty.
nb::list rows(Communicator& self) {
    nb::list found;
    for (int k = 0; k < self.size(); ++k) {
        const lagom::Row row = k == self.rank() ? lagom::Row{"", 0} : self.rows()[k];
        found.append(nb::steal(PyMemoryView_FromMemory(const_cast<char*>(row.data), Py_ssize_t(row.size), PyBUF_READ)));
    }
    return found;
}

bool average(Communicator& self, nb::bytes head, const std::vector<uintptr_t>& given, const std::vector<uintptr_t>& means,
             const Sections& sections) {
    if (given.size() != sections.all.size() || means.size() != given.size())
        throw lagom::Failure("there are other numbers than sections");
    const Unlocked released;
    static_assert(sizeof(uintptr_t) == sizeof(void*));
    return self.average({head.c_str(), head.size()}, sections.size, sections.all,
                        reinterpret_cast<const void* const*>(given.data()), reinterpret_cast<void* const*>(means.data()));
}

// See `lagom::stream`. Returns its ending, errno, the head of a message that differs, and the head that was expected.
std::tuple<int, int, nb::bytes, nb::bytes> stream(int following, int preceding, nb::bytes head,
                                                  const std::vector<std::tuple<uintptr_t, size_t, int>>& outgoing,
                                                  const std::vector<std::tuple<uintptr_t, size_t, bool>>& incoming, int type,
                                                  uintptr_t scratch, size_t scratch_size, double timeout_s) {
    if (head.size() < lagom::SIZE_AT + sizeof(uint64_t) || head.size() > lagom::LONGEST_HEAD)
        throw lagom::Failure("a head has another size");
    std::vector<lagom::Outgoing> outs;
    std::vector<lagom::Incoming> backs;
    for (const auto& [data, size, after] : outgoing) {
        if (after >= int(incoming.size())) throw lagom::Failure("a message is made of one that does not come");
        outs.push_back({static_cast<const char*>(at(data)), size, after});
    }
    for (const auto& [data, size, adds] : incoming) {
        if (adds && size % lagom::size_of(type_of(type))) throw lagom::Failure("a message ends within a number");
        backs.push_back({static_cast<char*>(at(data)), size, adds});
    }
    const std::string text(head.c_str(), head.size());
    lagom::Streamed found;
    {
        const Unlocked released;
        found = lagom::stream(following, preceding, text, outs, backs, type_of(type), static_cast<char*>(at(scratch)),
                              scratch_size, timeout_s);
    }
    return {int(found.ending), found.error, nb::bytes(found.found.data(), found.found.size()),
            nb::bytes(found.wanted.data(), found.wanted.size())};
}

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a rank ends by os._exit, which frees nothing
    module.attr("VERSION") = 12;  // of these bindings; lagom/exchange/native.py checks it
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const lagom::Interrupted& error) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyboardInterrupt, error.what());
        }
    });
    module.def("create", &lagom::Segment::create, "size"_a, "slot_bytes"_a, "mail_bytes"_a);
    module.def("started", &lagom::started, "pid"_a);
    module.def("has", [](int type, int op) { return lagom::has(type_of(type), op_of(op)); });
    module.def(
        "reduce",
        [](int type, int op, const std::vector<uintptr_t>& sources, uintptr_t out, size_t count) {
            if (sources.empty() || !lagom::has(type_of(type), op_of(op))) throw lagom::Failure("nothing to reduce");
            std::vector<const void*> all;
            for (const uintptr_t source : sources) all.push_back(at(source));
            lagom::reduce(type_of(type), op_of(op), all.data(), int(all.size()), at(out), nullptr, count);
        },
        Released());
    module.def(
        "draw_mask",
        [](uintptr_t generator, size_t size, double probability, uint64_t before, uintptr_t out, uint64_t count,
           uint64_t after) {
            if (size < sizeof(lagom::Twister)) throw lagom::Failure("this is not the state of a generator");
            if (!(probability >= 0 && probability <= 1)) throw lagom::Failure("this is not a probability");
            auto* twister = static_cast<lagom::Twister*>(at(generator));
            twister->skip(2 * before);
            twister->draw_mask(probability, static_cast<uint8_t*>(at(out)), count);
            twister->skip(2 * after);
        },
        Released());
    module.def("stream", &stream);
    nb::class_<Sections>(module, "Sections")
        .def(nb::init<const std::vector<std::tuple<size_t, size_t, int>>&, size_t>());
    nb::class_<Communicator>(module, "Communicator", nb::is_weak_referenceable())
        .def("set_timeout", [](Communicator& self, double timeout_s) { self.set_timeout(timeout_s); })
        .def("barrier", &Communicator::barrier, Released())
        .def("all_reduce", [](Communicator& self, uintptr_t data, size_t count, int type,
                              int op) { self.all_reduce(at(data), count, type_of(type), op_of(op)); }, Released())
        .def("reduce_scatter", [](Communicator& self, uintptr_t in, uintptr_t out, size_t count, int type, int op) {
            self.reduce_scatter(at(in), at(out), count, type_of(type), op_of(op)); }, Released())
        .def("reduce_parts", [](Communicator& self, uintptr_t in, const std::vector<uint64_t>& counts, uintptr_t out,
                                int type, int op) {
            self.reduce_parts(at(in), counts, at(out), type_of(type), op_of(op)); }, Released())
        .def("all_gather", [](Communicator& self, uintptr_t in, uintptr_t out, size_t bytes, int type) {
            self.all_gather(at(in), at(out), bytes, type_of(type)); },
             "source"_a, "out"_a, "size"_a, "type"_a = BYTES, Released())
        .def("broadcast", [](Communicator& self, uintptr_t data, size_t bytes, int root, int type) {
            self.broadcast(at(data), bytes, root, type_of(type)); },
             "data"_a, "size"_a, "root"_a, "type"_a = BYTES, Released())
        .def("gather", [](Communicator& self, uintptr_t in, uintptr_t out, size_t bytes, int root, int type) {
            self.gather(at(in), at(out), bytes, root, type_of(type)); },
             "source"_a, "out"_a, "size"_a, "root"_a, "type"_a = BYTES, Released())
        .def("scatter", [](Communicator& self, uintptr_t in, uintptr_t out, size_t bytes, int root, int type) {
            self.scatter(at(in), at(out), bytes, root, type_of(type)); },
             "source"_a, "out"_a, "size"_a, "root"_a, "type"_a = BYTES, Released())
        .def("all_to_all", [](Communicator& self, uintptr_t in, const std::vector<uint64_t>& to, uintptr_t out,
                              const std::vector<uint64_t>& from, int type) {
            self.all_to_all(at(in), to, at(out), from, type_of(type)); },
             "source"_a, "to"_a, "out"_a, "back"_a, "type"_a = BYTES, Released())
        .def("exchange", &exchange, "head"_a, "body"_a.none())
        .def("average", &average)
        .def("rows", &rows)
        .def("room", &Communicator::room)
        .def("send", [](Communicator& self, uintptr_t data, size_t bytes, int type, int to, uint64_t tag) {
            self.send(at(data), bytes, type_of(type), to, tag); }, Released())
        .def("receive", [](Communicator& self, uintptr_t data, size_t bytes, int type, int from, uint64_t tag) {
            self.receive(at(data), bytes, type_of(type), from, tag); }, Released())
        .def("sender", &Communicator::sender, Released())
        .def("waited", &Communicator::waited)
        .def("standing", [](Communicator& self) {
            const Communicator::Standing found = self.standing();
            return std::make_tuple(found.words, found.number, found.missing); })
        .def("abort", &Communicator::abort)
        .def("close", &Communicator::close, Released())
        .def("forget", &Communicator::forget);
    module.def("join", &join, "fd"_a, "rank"_a, "processes"_a, "timeout_s"_a, "spin_s"_a, "yields"_a);
}
