// The Python module of the test device, which torch.lagomtest calls; the only file that includes Python.
#include <Python.h>

#include <torch/csrc/Generator.h>

#include "device.hpp"

#include <memory>

namespace {

using lagomtest::Task;

void release_and_call(const Task& call) {
    if (PyGILState_Check() == 0) return call();
    PyThreadState* state = PyEval_SaveThread();
    call();
    PyEval_RestoreThread(state);
}

// Calls a function that may throw, or wait for what other threads of Python do.
template <class Call>
PyObject* outside_python(Call call) {
    std::string error;
    bool is_error = false;
    Py_BEGIN_ALLOW_THREADS;
    try {
        call();
    } catch (const std::exception& caught) {
        is_error = true;
        const auto* of_torch = dynamic_cast<const c10::Error*>(&caught);
        error = of_torch != nullptr ? of_torch->what_without_backtrace() : caught.what();
    }
    Py_END_ALLOW_THREADS;
    if (is_error) {
        PyErr_SetString(PyExc_RuntimeError, error.c_str());
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject* device_count(PyObject*, PyObject*) { return PyLong_FromLong(lagomtest::device_count()); }
PyObject* current_device(PyObject*, PyObject*) { return PyLong_FromLong(lagomtest::current_device()); }
PyObject* in_bad_fork(PyObject*, PyObject*) { return PyBool_FromLong(lagomtest::in_bad_fork()); }
PyObject* is_initialized(PyObject*, PyObject*) { return PyBool_FromLong(lagomtest::is_initialized()); }
PyObject* num_synchronized(PyObject*, PyObject*) {
    return PyLong_FromUnsignedLongLong(lagomtest::num_synchronized());
}

PyObject* initialize(PyObject*, PyObject*) { return outside_python(&lagomtest::initialize); }

PyObject* set_device(PyObject*, PyObject* args) {
    int index = 0;
    if (PyArg_ParseTuple(args, "i", &index) == 0) return nullptr;
    return outside_python([&] { lagomtest::set_device(c10::DeviceIndex(index)); });
}

PyObject* forbid_synchronizing(PyObject*, PyObject* args) {
    int is_forbidden = 0;
    if (PyArg_ParseTuple(args, "p", &is_forbidden) == 0) return nullptr;
    lagomtest::forbid_synchronizing(is_forbidden != 0);
    Py_RETURN_NONE;
}

PyObject* set_total_bytes(PyObject*, PyObject* args) {
    int index = 0;
    Py_ssize_t size = 0;
    if (PyArg_ParseTuple(args, "in", &index, &size) == 0) return nullptr;
    return outside_python([&] { lagomtest::set_total_bytes(c10::DeviceIndex(index), size_t(size)); });
}

PyObject* default_generator(PyObject*, PyObject* args) {
    int index = 0;
    if (PyArg_ParseTuple(args, "i", &index) == 0) return nullptr;
    return THPGenerator_Wrap(lagomtest::default_generator(c10::DeviceIndex(index)));
}

c10::Stream stream_of(int index, long long id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(lagomtest::kType, c10::DeviceIndex(index)), id);
}

// Queues a function of Python as a late task; its error is that of the call which runs it.
PyObject* enqueue(PyObject*, PyObject* args) {
    int index = 0;
    long long id = 0;
    PyObject* function = nullptr;
    if (PyArg_ParseTuple(args, "iLO", &index, &id, &function) == 0) return nullptr;
    Py_INCREF(function);
    std::shared_ptr<PyObject> held(function, [](PyObject* object) {
        const PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(object);
        PyGILState_Release(state);
    });
    lagomtest::enqueue(stream_of(index, id), [held] {
        std::string error;
        const PyGILState_STATE state = PyGILState_Ensure();
        PyObject* result = PyObject_CallNoArgs(held.get());
        if (result == nullptr) {
            PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
            PyErr_Fetch(&type, &value, &traceback);
            PyErr_NormalizeException(&type, &value, &traceback);
            PyObject* text = value != nullptr ? PyObject_Str(value) : nullptr;
            const char* bytes = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
            error = bytes != nullptr ? bytes : "a late task failed";
            Py_XDECREF(text);
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(traceback);
        }
        Py_XDECREF(result);
        PyGILState_Release(state);
        if (!error.empty()) throw std::runtime_error(error);
    });
    Py_RETURN_NONE;
}

PyObject* drain(PyObject*, PyObject* args) {
    int index = 0;
    long long id = 0;
    if (PyArg_ParseTuple(args, "iL", &index, &id) == 0) return nullptr;
    return outside_python([&] { lagomtest::drain(stream_of(index, id)); });
}

PyObject* num_pending(PyObject*, PyObject* args) {
    int index = 0;
    long long id = 0;
    if (PyArg_ParseTuple(args, "iL", &index, &id) == 0) return nullptr;
    return PyLong_FromSize_t(lagomtest::num_pending(stream_of(index, id)));
}

PyMethodDef methods[] = {
    {"device_count", &device_count, METH_NOARGS, nullptr},
    {"current_device", &current_device, METH_NOARGS, nullptr},
    {"set_device", &set_device, METH_VARARGS, nullptr},
    {"in_bad_fork", &in_bad_fork, METH_NOARGS, nullptr},
    {"is_initialized", &is_initialized, METH_NOARGS, nullptr},
    {"initialize", &initialize, METH_NOARGS, nullptr},
    {"set_total_bytes", &set_total_bytes, METH_VARARGS, nullptr},
    {"default_generator", &default_generator, METH_VARARGS, nullptr},
    {"forbid_synchronizing", &forbid_synchronizing, METH_VARARGS, nullptr},
    {"num_synchronized", &num_synchronized, METH_NOARGS, nullptr},
    {"enqueue", &enqueue, METH_VARARGS, nullptr},
    {"drain", &drain, METH_VARARGS, nullptr},
    {"num_pending", &num_pending, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "lagomtest_device", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_lagomtest_device() {
    lagomtest::without_gil = &release_and_call;
    return PyModule_Create(&definition);
}
