// SPDX-License-Identifier: Apache-2.0
// The module vllm.cumem_allocator: memory that can be put to sleep, for
// torch.cuda.memory.CUDAPluggableAllocator (my_malloc and my_free), with the
// table of its segments for Python. Built for the stable ABI.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "allocator.h"

#define CUMEM_EXPORT extern "C" __attribute__((visibility("default")))

// PyTorch calls both under its allocator's lock. Without observers neither
// touches the GIL: its holder may be waiting for that very lock.
CUMEM_EXPORT void* my_malloc(ssize_t size, int device, CUstream stream) {
  return cumem::allocate(size, device, stream);
}

CUMEM_EXPORT void my_free(void* pointer, ssize_t, int, CUstream stream) {
  cumem::deallocate(pointer, stream);
}

namespace {

// Runs `work` without the GIL.
template <typename Work>
auto without_gil(Work work) {
  PyThreadState* const state = PyEval_SaveThread();
  auto result = work();
  PyEval_RestoreThread(state);
  return result;
}

// --- Observers ---------------------------------------------------------------

// Strong references, read and written under the GIL only.
PyObject* observe_malloc = nullptr;
PyObject* observe_free = nullptr;

// Calls `callable(argument)`, and takes the reference to `argument`. What it
// raises is latched: the caller is PyTorch, which cannot be told.
void notify(PyObject* callable, PyObject* argument, const char* what) {
  // It may replace the observers while it runs.
  Py_INCREF(callable);
  PyObject* result =
      argument ? PyObject_CallFunctionObjArgs(callable, argument, nullptr)
               : nullptr;
  if (result == nullptr) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject* text = value ? PyObject_Repr(value) : nullptr;
    PyObject* bytes = text ? PyUnicode_AsUTF8String(text) : nullptr;
    const char* words = bytes ? PyBytes_AsString(bytes) : nullptr;
    cumem::table().latch(std::string(what) + " raised " +
                         (words ? words : "an error that has no text"));
    PyErr_Clear();
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
  }
  Py_XDECREF(result);
  Py_XDECREF(argument);
  Py_DECREF(callable);
}

// Threads that wait for the GIL, or have it, for the sake of an observer.
std::atomic<int> observing{0};

template <typename Work>
void with_gil(Work work) {
  observing.fetch_add(1);
  // Read again after the line above: whoever removes the observers waits for
  // the threads that are counted there.
  if (cumem::observer().load() == nullptr || !Py_IsInitialized()) {
    observing.fetch_sub(1);
    return;
  }
  const PyGILState_STATE state = PyGILState_Ensure();
  // The calling thread may be in the middle of an exception of its own.
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  work();
  PyErr_Restore(type, value, trace);
  PyGILState_Release(state);
  observing.fetch_sub(1);
}

const cumem::Observer python_observer = {
    [](const cumem::Segment& segment) {
      with_gil([&segment] {
        if (observe_malloc == nullptr) return;
        notify(observe_malloc,
               Py_BuildValue("(iKKK)", segment.device, segment.size,
                             segment.address, segment.handle),
               "the malloc observer");
      });
    },
    [](std::uint64_t address) {
      with_gil([address] {
        if (observe_free == nullptr) return;
        notify(observe_free, PyLong_FromUnsignedLongLong(address),
               "the free observer");
      });
    },
};

void set_observers(PyObject* on_malloc, PyObject* on_free) {
  cumem::observer().store(on_malloc ? &python_observer : nullptr);
  Py_XINCREF(on_malloc);
  Py_XINCREF(on_free);
  PyObject* const old_malloc = std::exchange(observe_malloc, on_malloc);
  PyObject* const old_free = std::exchange(observe_free, on_free);
  Py_XDECREF(old_malloc);
  Py_XDECREF(old_free);
}

PyObject* forget_observers(PyObject*, PyObject*) {
  set_observers(nullptr, nullptr);
  without_gil([] {
    // An observer that never returns must not keep the process from ending.
    for (int tries = 0; observing.load() != 0 && tries < 1000; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  });
  Py_RETURN_NONE;
}

PyMethodDef forget_observers_method = {"forget_observers", forget_observers,
                                       METH_NOARGS, nullptr};

// Observers must not be called once the interpreter is being finalized: a
// thread that asks for the GIL then is ended inside PyTorch. Handlers of
// `atexit` run before that point.
bool forget_observers_at_exit() {
  static bool registered = false;
  if (registered) return true;
  PyObject* module = PyImport_ImportModule("atexit");
  PyObject* handler = PyCFunction_New(&forget_observers_method, nullptr);
  PyObject* done = module && handler
                       ? PyObject_CallMethod(module, "register", "O", handler)
                       : nullptr;
  registered = done != nullptr;
  Py_XDECREF(done);
  Py_XDECREF(handler);
  Py_XDECREF(module);
  return registered;
}

PyObject* init_module(PyObject*, PyObject* args) {
  PyObject* on_malloc = nullptr;
  PyObject* on_free = nullptr;
  if (!PyArg_ParseTuple(args, "OO:init_module", &on_malloc, &on_free)) {
    return nullptr;
  }
  if (on_malloc == Py_None && on_free == Py_None) {
    set_observers(nullptr, nullptr);
    Py_RETURN_NONE;
  }
  if (!PyCallable_Check(on_malloc) || !PyCallable_Check(on_free)) {
    PyErr_SetString(PyExc_TypeError,
                    "init_module needs two callables, or None twice");
    return nullptr;
  }
  if (!forget_observers_at_exit()) return nullptr;
  set_observers(on_malloc, on_free);
  Py_RETURN_NONE;
}

// --- Sleep and wake ----------------------------------------------------------

using Change = cumem::Status (*)(int device, std::uint64_t size,
                                 std::uint64_t address);

PyObject* change_segment(PyObject* args, const char* format, Change change) {
  int device = 0;
  unsigned long long size = 0, address = 0, handle = 0;
  if (!PyArg_ParseTuple(args, format, &device, &size, &address, &handle)) {
    return nullptr;
  }
  const cumem::Status status =
      without_gil([&] { return change(device, size, address); });
  if (!status.ok()) {
    PyErr_SetString(PyExc_RuntimeError, status.text().c_str());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* python_create_and_map(PyObject*, PyObject* args) {
  return change_segment(args, "iKKK:python_create_and_map",
                        cumem::wake_segment);
}

PyObject* python_unmap_and_release(PyObject*, PyObject* args) {
  return change_segment(args, "iKKK:python_unmap_and_release",
                        cumem::put_segment_to_sleep);
}

PyObject* hold(PyObject*, PyObject* args) {
  unsigned long long address = 0, serial = 0;
  if (!PyArg_ParseTuple(args, "KK:hold", &address, &serial)) return nullptr;
  return PyBool_FromLong(
      without_gil([&] { return cumem::table().hold(address, serial); }));
}

PyObject* unhold(PyObject*, PyObject* args) {
  unsigned long long address = 0;
  if (!PyArg_ParseTuple(args, "K:unhold", &address)) return nullptr;
  if (!without_gil([&] { return cumem::unhold_segment(address); })) {
    PyErr_SetString(PyExc_RuntimeError, ("unhold: nobody holds a segment at " +
                                         cumem::hexadecimal(address))
                                            .c_str());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// --- Labels and figures ------------------------------------------------------

PyObject* set_scope(PyObject*, PyObject* args) {
  const char* tag = nullptr;
  Py_ssize_t length = 0;
  long long generation = 0;
  if (!PyArg_ParseTuple(args, "s#L:set_scope", &tag, &length, &generation)) {
    return nullptr;
  }
  const std::string name(tag, length);
  cumem::scope().tag = without_gil([&] { return cumem::table().intern(name); });
  cumem::scope().generation = generation;
  Py_RETURN_NONE;
}

PyObject* text_object(const std::string& text) {
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()),
                              "replace");
}

PyObject* get_scope(PyObject*, PyObject*) {
  return Py_BuildValue("(NL)", text_object(*cumem::scope_tag()),
                       static_cast<long long>(cumem::scope().generation));
}

PyObject* segment_object(const cumem::Segment& segment) {
  return Py_BuildValue("(iKKKNNKL)", segment.device,
                       static_cast<unsigned long long>(segment.size),
                       static_cast<unsigned long long>(segment.address),
                       static_cast<unsigned long long>(segment.handle),
                       text_object(*segment.tag),
                       PyBool_FromLong(segment.asleep),
                       static_cast<unsigned long long>(segment.serial),
                       static_cast<long long>(segment.generation));
}

// A list of `make(item)` for each item.
template <typename Items, typename Make>
PyObject* list_object(const Items& items, Make make) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(items.size()));
  Py_ssize_t index = 0;
  for (const auto& item : items) {
    PyObject* object = list ? make(item) : nullptr;
    if (object == nullptr) {
      Py_XDECREF(list);
      return nullptr;
    }
    PyList_SetItem(list, index++, object);
  }
  return list;
}

PyObject* segments(PyObject*, PyObject*) {
  return list_object(without_gil([] {
                       cumem::offer_leftovers();
                       return cumem::table().snapshot();
                     }),
                     segment_object);
}

PyObject* take_errors(PyObject*, PyObject*) {
  return list_object(without_gil([] { return cumem::table().take_errors(); }),
                     text_object);
}

PyObject* counters(PyObject*, PyObject*) {
  const cumem::Counters now = without_gil([] {
    cumem::offer_leftovers();
    return cumem::table().counters();
  });
  return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsK}", "mapped_bytes",
                       now.mapped_bytes, "peak_mapped_bytes",
                       now.peak_mapped_bytes, "reserved_bytes",
                       now.reserved_bytes, "returned_bytes", now.returned_bytes,
                       "segments", now.segments, "mallocs", now.mallocs,
                       "frees", now.frees, "failed_mallocs", now.failed_mallocs,
                       "errors", now.errors, "leftovers", now.leftovers);
}

PyObject* reset_peak(PyObject*, PyObject*) {
  without_gil([] {
    cumem::table().reset_peak();
    return true;
  });
  Py_RETURN_NONE;
}

PyObject* driver_available(PyObject*, PyObject*) {
  return PyBool_FromLong(
      without_gil([] { return cumem::driver().missing.empty(); }));
}

// --- The module --------------------------------------------------------------

PyMethodDef methods[] = {
    {"init_module", init_module, METH_VARARGS,
     "init_module(malloc_fn, free_fn)\n\n"
     "Install two observers, or none with None twice. malloc_fn receives\n"
     "(device, size, address, handle) of each new segment, free_fn the "
     "address\n"
     "of each segment that is about to be freed. With observers, allocating\n"
     "and freeing wait for the GIL under PyTorch's allocator lock."},
    {"python_create_and_map", python_create_and_map, METH_VARARGS,
     "python_create_and_map(device, size, address, handle)\n\n"
     "Wake a segment: fresh physical memory at the same address. The handle "
     "is\n"
     "ignored. Raises RuntimeError, and the segment is asleep as before."},
    {"python_unmap_and_release", python_unmap_and_release, METH_VARARGS,
     "python_unmap_and_release(device, size, address, handle)\n\n"
     "Put a segment to sleep: its physical memory goes, its address stays. "
     "The\n"
     "handle is ignored. The caller makes sure that no kernel uses it. Raises\n"
     "RuntimeError if the driver refuses."},
    {"set_scope", set_scope, METH_VARARGS,
     "set_scope(tag, generation)\n\nLabel what this thread allocates next."},
    {"get_scope", get_scope, METH_NOARGS,
     "get_scope() -> (tag, generation)\n\nThis thread's labels."},
    {"segments", segments, METH_NOARGS,
     "segments() -> list of (device, size, address, handle, tag, asleep,\n"
     "serial, generation)\n\n"
     "The segments that exist, in order of address; sizes in bytes."},
    {"hold", hold, METH_VARARGS,
     "hold(address, serial) -> bool\n\n"
     "Postpone any free of that very segment until unhold(address). False if\n"
     "it no longer exists."},
    {"unhold", unhold, METH_VARARGS,
     "unhold(address)\n\n"
     "Undo one hold. The caller's work on the segment must be over: it is\n"
     "released now if it was freed meanwhile."},
    {"counters", counters, METH_NOARGS,
     "counters() -> dict\n\n"
     "mapped_bytes, peak_mapped_bytes, reserved_bytes (addresses, mapped or\n"
     "asleep), returned_bytes (of freed segments, those freed asleep left "
     "out),\n"
     "segments, mallocs, frees, failed_mallocs, errors. Bytes include "
     "segments\n"
     "whose free is postponed. leftovers: segments and failed attempts of "
     "which\n"
     "the driver refused to take something back. It is offered again at each\n"
     "call, and what is mapped or reserved stays in the bytes."},
    {"reset_peak", reset_peak, METH_NOARGS,
     "reset_peak()\n\nSet peak_mapped_bytes to mapped_bytes."},
    {"take_errors", take_errors, METH_NOARGS,
     "take_errors() -> list of str\n\n"
     "The errors of allocating and freeing since the last call, at most 256."},
    {"driver_available", driver_available, METH_NOARGS,
     "driver_available() -> bool\n\n"
     "Whether libcuda.so.1 opens and has what is needed. Does not start CUDA."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    "cumem_allocator",
    "Device memory that can be put to sleep, for CUDAPluggableAllocator.",
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

CUMEM_EXPORT PyObject* PyInit_cumem_allocator() {
  return PyModule_Create(&module_definition);
}
