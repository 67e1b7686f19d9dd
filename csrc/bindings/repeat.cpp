#include "repeat.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace fp8core::bindings {
namespace {

thread_local PyObject* current_listener = nullptr;

py::object stolen(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

std::size_t address_of(const py::object& data_ptr, py::handle tensor) {
  const py::object address = stolen(PyObject_CallOneArg(data_ptr.ptr(), tensor.ptr()));
  const std::size_t value = PyLong_AsSize_t(address.ptr());
  if (value == static_cast<std::size_t>(-1) && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

}  // namespace

std::int64_t& num_unheard() {
  static thread_local std::int64_t count = 0;
  return count;
}

py::handle listener() { return current_listener; }

py::object listening(const py::object& listen, const py::object& run) {
  struct Restored {
    PyObject* before = current_listener;
    ~Restored() { current_listener = before; }
  } restored;
  current_listener = listen.ptr();
  return run();
}

void hand_over(std::unique_ptr<Launch> launch) {
  listener()(std::shared_ptr<Launch>(std::move(launch)));
}

Program::Program(Memory memory, std::size_t alignment)
    : memory_(std::move(memory)), alignment_(alignment) {}

void Program::add_leading(std::size_t address) {
  FP8CORE_CHECK(saved_.empty() && constants_.empty() && steps_.empty(),
                "leading tensors come first");
  leading_.push_back({address != 0, address});
  ++num_tensors_;
}

void Program::add_saved(std::size_t address) {
  FP8CORE_CHECK(constants_.empty() && steps_.empty(), "saved tensors follow the leading ones");
  saved_.push_back({address != 0, address});
  ++num_tensors_;
}

void Program::add_constant(py::object tensor, std::size_t address) {
  FP8CORE_CHECK(steps_.empty(), "constants come before the steps");
  constants_.push_back({true, address});
  constant_tensors_.push_back(std::move(tensor));
  ++num_tensors_;
}

void Program::check_number(int tensor) const {
  FP8CORE_CHECK(tensor >= 0 && tensor < num_tensors_, "tensor ", tensor, " of ", num_tensors_);
}

bool Program::is_saved(int tensor) const {
  const int number = tensor - static_cast<int>(leading_.size());
  return number >= 0 && number < static_cast<int>(saved_.size());
}

void Program::add_empty(int tensor, py::tuple size, py::tuple stride, py::object dtype) {
  FP8CORE_CHECK(tensor == num_tensors_, "tensor ", tensor, "; expected ", num_tensors_);
  ++num_tensors_;
  steps_.push_back([=](Frame* frame) {
    PyObject* arguments[] = {size.ptr(), stride.ptr(), dtype.ptr()};
    frame->tensors[tensor] = stolen(PyObject_Vectorcall(frame->empty.ptr(), arguments, 3, nullptr));
    frame->starts[tensor] = address_of(memory_.data_ptr, frame->tensors[tensor]);
  });
}

void Program::add_launch(std::shared_ptr<Launch> launch) {
  steps_.push_back(
      [launch = std::move(launch)](Frame* frame) { launch->run(frame->starts, frame->stream); });
}

void Program::add_call(int tensor, py::object function, py::list arguments, std::vector<int> from,
                       py::dict keywords) {
  FP8CORE_CHECK(tensor == num_tensors_, "tensor ", tensor, "; expected ", num_tensors_);
  FP8CORE_CHECK(from.size() == arguments.size(), from.size(), " numbers for ", arguments.size(),
                " arguments");
  for (const int number : from)
    if (number >= 0) check_number(number);
  ++num_tensors_;
  steps_.push_back([=](Frame* frame) {
    py::tuple passed(from.size());
    for (std::size_t at = 0; at < from.size(); ++at) {
      const py::handle one =
          from[at] >= 0 ? py::handle(frame->tensors[from[at]]) : py::handle(arguments[at]);
      PyTuple_SET_ITEM(passed.ptr(), at, one.inc_ref().ptr());
    }
    frame->tensors[tensor] = stolen(PyObject_Call(function.ptr(), passed.ptr(), keywords.ptr()));
    frame->starts[tensor] = address_of(memory_.data_ptr, frame->tensors[tensor]);
  });
}

void Program::add_release(int tensor) {
  check_number(tensor);
  if (!is_saved(tensor)) {
    steps_.push_back([=](Frame* frame) { frame->tensors[tensor] = py::object(); });
    return;
  }
  const Py_ssize_t at = tensor - static_cast<Py_ssize_t>(leading_.size());
  steps_.push_back([=](Frame* frame) {
    frame->tensors[tensor] = py::object();
    PyList_SetItem(frame->saved, at, py::none().release().ptr());
  });
}

void Program::add_result(int tensor) {
  if (tensor >= 0) check_number(tensor);
  Result result;
  result.tensor = tensor;
  results_.push_back(std::move(result));
}

void Program::add_view(int tensor, py::tuple size, py::tuple stride, std::int64_t offset) {
  check_number(tensor);
  Result result;
  result.tensor = tensor;
  result.is_view = true;
  result.size = std::move(size);
  result.stride = std::move(stride);
  result.offset = offset;
  results_.push_back(std::move(result));
}

bool Program::take(Frame* frame, int tensor, py::handle object, const Given& expected) const {
  if (!expected.is_tensor) return object.is_none();
  if (object.is_none()) return false;
  const std::size_t address = address_of(memory_.data_ptr, object);
  if (address == 0 || ((address ^ expected.address) & (alignment_ - 1)) != 0) return false;
  frame->tensors[tensor] = py::reinterpret_borrow<py::object>(object);
  frame->starts[tensor] = address;
  return true;
}

py::object Program::run(const py::tuple& leading, const py::object& saved) const {
  const std::size_t num_saved = saved.is_none() ? 0 : PyList_GET_SIZE(saved.ptr());
  if (leading.size() != leading_.size() || num_saved != saved_.size()) return py::none();
  Frame frame{saved.is_none() ? nullptr : saved.ptr(), {}, 0, {}, {}};
  frame.tensors.resize(num_tensors_);
  frame.starts.resize(num_tensors_);
  int tensor = 0;
  for (std::size_t at = 0; at < leading_.size(); ++at, ++tensor)
    if (!take(&frame, tensor, PyTuple_GET_ITEM(leading.ptr(), at), leading_[at])) return py::none();
  for (std::size_t at = 0; at < saved_.size(); ++at, ++tensor)
    if (!take(&frame, tensor, PyList_GET_ITEM(frame.saved, at), saved_[at])) return py::none();
  for (std::size_t at = 0; at < constants_.size(); ++at, ++tensor)
    if (!take(&frame, tensor, constant_tensors_[at], constants_[at])) return py::none();
  bool is_here = !memory_.here.is_none();
  if (is_here) {
    const py::object current = stolen(PyObject_CallNoArgs(memory_.current_device.ptr()));
    is_here = PyLong_AsLong(current.ptr()) == memory_.device;
  }
  frame.empty = is_here ? memory_.here : memory_.elsewhere;
  const py::object device = py::int_(memory_.device);
  const py::object stream = stolen(PyObject_CallOneArg(memory_.raw_stream.ptr(), device.ptr()));
  frame.stream = PyLong_AsSize_t(stream.ptr());
  if (PyErr_Occurred()) throw py::error_already_set();
  for (const auto& step : steps_) step(&frame);
  py::tuple results(results_.size());
  for (std::size_t at = 0; at < results_.size(); ++at) {
    const Result& result = results_[at];
    py::object value = py::none();
    if (result.is_view)
      value = memory_.as_strided(frame.tensors[result.tensor], result.size, result.stride,
                                 result.offset);
    else if (result.tensor >= 0)
      value = frame.tensors[result.tensor];
    PyTuple_SET_ITEM(results.ptr(), at, value.release().ptr());
  }
  if (frame.saved != nullptr && PyList_SetSlice(frame.saved, 0, num_saved, nullptr) != 0)
    throw py::error_already_set();
  return results;
}

void register_repeat(py::module_& module) {
  py::class_<Launch, std::shared_ptr<Launch>>(module, "Launch")
      .def("addresses", &Launch::addresses)
      .def("set_places", [](Launch& launch, const std::vector<std::pair<int, std::size_t>>& at) {
        FP8CORE_CHECK(at.size() == launch.addresses().size(), at.size(), " places for ",
                      launch.addresses().size(), " addresses");
        std::vector<Place> places;
        for (const auto& [tensor, offset] : at) places.push_back({tensor, offset});
        launch.set_places(std::move(places));
      });
  py::class_<Memory>(module, "Memory")
      .def(py::init([](int device, py::object current_device, py::object here, py::object elsewhere,
                       py::object data_ptr, py::object as_strided, py::object raw_stream) {
        return Memory{device, current_device, here, elsewhere, data_ptr, as_strided, raw_stream};
      }));
  py::class_<Program>(module, "Program")
      .def(py::init<Memory, std::size_t>())
      .def("add_leading", &Program::add_leading)
      .def("add_saved", &Program::add_saved)
      .def("add_constant", &Program::add_constant)
      .def("add_empty", &Program::add_empty)
      .def("add_launch", &Program::add_launch)
      .def("add_call", &Program::add_call)
      .def("add_release", &Program::add_release)
      .def("add_result", &Program::add_result)
      .def("add_view", &Program::add_view)
      .def("__call__", &Program::run, py::arg("leading"), py::arg("saved") = py::none());
  module.def("listening", &listening);
  module.def("num_unheard", [] { return num_unheard(); });
}

}  // namespace fp8core::bindings
