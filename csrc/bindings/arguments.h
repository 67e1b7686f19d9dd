// How a Python tuple becomes an argument struct: value by value in the order of `fields()`, where
// the fields of a nested struct stand in its place. Addresses are integers.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "fp8core/check.h"

namespace fp8core::bindings {

// How many argument structs the calling thread has read, less those of entries that were recorded
// (repeat.h): it stays the same while no entry is called that a recording would miss.
std::int64_t& num_unheard();

template <typename T, typename = void>
constexpr bool has_fields = false;
template <typename T>
constexpr bool has_fields<T, std::void_t<decltype(std::declval<T&>().fields())>> = true;

// Values in the tuple of a field, or of all fields of a struct.
template <typename T>
int num_values() {
  if constexpr (has_fields<T>)
    return std::apply(
        [](auto&... field) { return (num_values<std::decay_t<decltype(field)>>() + ...); },
        T{}.fields());
  else
    return 1;
}

template <typename T>
bool read(PyObject* from, T* to) {
  if constexpr (std::is_pointer_v<T>) {
    const std::size_t address = PyLong_AsSize_t(from);
    *to = reinterpret_cast<T>(address);
    return address != static_cast<std::size_t>(-1);
  } else if constexpr (std::is_integral_v<T>) {
    const long long value = PyLong_AsLongLong(from);
    *to = static_cast<T>(value);
    return *to == value && !(value == -1 && PyErr_Occurred());
  } else {  // an enumerator
    pybind11::detail::make_caster<T> caster;
    if (!caster.load(from, /*convert=*/false)) return false;
    *to = pybind11::detail::cast_op<T>(caster);
    return true;
  }
}

template <typename T>
bool read(PyObject* from, std::vector<T>* to) {
  if (!PyList_Check(from)) return false;
  to->resize(PyList_GET_SIZE(from));
  for (std::size_t i = 0; i < to->size(); ++i)
    if (!read(PyList_GET_ITEM(from, i), &(*to)[i])) return false;
  return true;
}

// Reads the values from `at` on; those that the tuple leaves out keep their defaults.
template <typename Struct>
void read_fields(PyObject* tuple, Py_ssize_t* at, Struct* to) {
  const auto read_field = [&](auto& field) {
    if constexpr (has_fields<std::decay_t<decltype(field)>>) {
      read_fields(tuple, at, &field);
    } else if (*at < PyTuple_GET_SIZE(tuple)) {
      if (!read(PyTuple_GET_ITEM(tuple, *at), &field)) {
        PyErr_Clear();
        throw pybind11::type_error(join(pybind11::type_id<Struct>(), ": value ", *at, " is ",
                                        std::string(pybind11::repr(PyTuple_GET_ITEM(tuple, *at))),
                                        "; expected ",
                                        pybind11::type_id<std::decay_t<decltype(field)>>()));
      }
      ++*at;
    }
  };
  std::apply([&](auto&... field) { (read_field(field), ...); }, to->fields());
}

}  // namespace fp8core::bindings

namespace pybind11::detail {

template <typename Struct>
class type_caster<Struct, std::enable_if_t<fp8core::bindings::has_fields<Struct>>> {
 public:
  PYBIND11_TYPE_CASTER(Struct, const_name("tuple"));

  bool load(handle from, bool) {
    if (!PyTuple_Check(from.ptr())) return false;
    static const Py_ssize_t most = fp8core::bindings::num_values<Struct>();
    const Py_ssize_t size = PyTuple_GET_SIZE(from.ptr());
    if (size > most || size < most - Struct::kOptional)
      throw type_error(fp8core::join(type_id<Struct>(), ": ", size, " values; expected ",
                                     most - Struct::kOptional, " to ", most));
    Py_ssize_t at = 0;
    fp8core::bindings::read_fields(from.ptr(), &at, &value);
    ++fp8core::bindings::num_unheard();
    return true;
  }
};

}  // namespace pybind11::detail
