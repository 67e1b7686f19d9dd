// Native calls that are made again without Python in between: an entry that Python calls while its
// thread listens is handed over as a Launch, and a Program enqueues launches for other tensors.
//
// Nothing here knows which operations there are. Whoever listens decides what a program consists
// of, and names each address by the tensor in which it lies.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.h"
#include "fp8core/device.h"
#include "fp8core/gemm.h"

namespace fp8core::bindings {

// An address by the number of the tensor in which it lies; kNowhere for a null pointer.
struct Place {
  static constexpr int kNowhere = -1;

  int tensor = kNowhere;
  std::size_t offset = 0;  // bytes from the tensor's first element
};

template <typename T>
constexpr bool is_vector = false;
template <typename T>
constexpr bool is_vector<std::vector<T>> = true;

// Visits the pointers of an argument struct in the order of its fields.
template <typename T, typename Visit>
void for_each_address(T& value, const Visit& visit) {
  if constexpr (has_fields<T>)
    std::apply([&](auto&... field) { (for_each_address(field, visit), ...); }, value.fields());
  else if constexpr (is_vector<T>)
    for (auto& one : value) for_each_address(one, visit);
  else if constexpr (std::is_pointer_v<T>)
    visit(value);
}

// A call of an entry: its descriptors and arguments, with a place for each address.
class Launch {
 public:
  virtual ~Launch() = default;
  // The addresses of the call that was recorded, in the order of their places.
  virtual std::vector<std::size_t> addresses() const = 0;
  void set_places(std::vector<Place> places) { places_ = std::move(places); }
  // Enqueues it; `starts` are the addresses of tensors by number.
  virtual void run(const std::vector<std::size_t>& starts, StreamHandle stream) const = 0;

 protected:
  std::vector<Place> places_;
};

// How a launch keeps a parameter of its entry, and passes it again.
template <typename Parameter>
struct Kept {
  using Type = std::decay_t<Parameter>;

  static const Type& keep(const Type& value) { return value; }
  static const Type& pass(const Type& kept) { return kept; }
};
template <>
struct Kept<Gemm&> {
  using Type = std::shared_ptr<Gemm>;

  static Type keep(Gemm& gemm) { return gemm.shared_from_this(); }
  static Gemm& pass(const Type& kept) { return *kept; }
};

template <auto kEntry, typename... Parameters>
class LaunchOf final : public Launch {
 public:
  explicit LaunchOf(Parameters... parameters) : kept_(Kept<Parameters>::keep(parameters)...) {}

  std::vector<std::size_t> addresses() const override {
    std::vector<std::size_t> found;
    auto copy = kept_;
    visit(copy, [&](auto*& pointer) { found.push_back(reinterpret_cast<std::size_t>(pointer)); });
    return found;
  }

  void run(const std::vector<std::size_t>& starts, StreamHandle stream) const override {
    auto copy = kept_;  // another thread may run the same launch
    auto place = places_.begin();
    visit(copy, [&](auto*& pointer) {
      using Pointer = std::decay_t<decltype(pointer)>;
      const std::size_t address =
          place->tensor == Place::kNowhere ? 0 : starts[place->tensor] + place->offset;
      pointer = reinterpret_cast<Pointer>(address);
      ++place;
    });
    std::get<sizeof...(Parameters) - 1>(copy) = stream;
    std::apply([](const auto&... kept) { kEntry(Kept<Parameters>::pass(kept)...); }, copy);
  }

 private:
  using All = std::tuple<typename Kept<Parameters>::Type...>;
  static_assert(std::is_same_v<std::tuple_element_t<sizeof...(Parameters) - 1, All>, StreamHandle>);

  template <typename Visit>
  static void visit(All& all, const Visit& visit) {
    std::apply([&](auto&... one) { (for_each_address(one, visit), ...); }, all);
  }

  All kept_;
};

// The function of the calling thread that is given each launch, or null.
pybind11::handle listener();
// Calls `run`, and has `listen` called with each launch that the thread makes in the meantime.
pybind11::object listening(const pybind11::object& listen, const pybind11::object& run);
void hand_over(std::unique_ptr<Launch> launch);

template <auto kEntry>
struct Recorded;
template <typename Result, typename... Parameters, Result (*kEntry)(Parameters...)>
struct Recorded<kEntry> {
  static Result call(Parameters... parameters) {
    num_unheard() -= (has_fields<std::decay_t<Parameters>> + ...);
    if (!listener()) return kEntry(parameters...);
    // Kept first: afterwards the entry may have changed what it was passed by reference.
    auto launch = std::make_unique<LaunchOf<kEntry, Parameters...>>(parameters...);
    if constexpr (std::is_void_v<Result>) {
      kEntry(parameters...);
      hand_over(std::move(launch));
    } else {
      Result result = kEntry(parameters...);
      hand_over(std::move(launch));
      return result;
    }
  }
};

// What is registered for an entry, so that a call of it is heard.
template <auto kEntry>
constexpr auto recorded = &Recorded<kEntry>::call;

// Where the tensors of a program come from: functions of Python.
struct Memory {
  int device;
  pybind11::object current_device;  // () -> index
  pybind11::object here;        // (size, stride, dtype) -> tensor on the current device; or None
  pybind11::object elsewhere;   // (size, stride, dtype) -> tensor on `device`
  pybind11::object data_ptr;    // (tensor) -> address
  pybind11::object as_strided;  // (tensor, size, stride, offset) -> tensor
  pybind11::object raw_stream;  // (index) -> stream
};

// The tensors of a program while it runs, by number.
struct Frame {
  PyObject* saved;         // the list that the caller gave, or null
  pybind11::handle empty;  // what allocates now
  StreamHandle stream;
  std::vector<pybind11::object> tensors;
  std::vector<std::size_t> starts;
};

// What a run consisted of, in order. Tensors are numbered: `leading` ones that each call passes,
// then those of the list `saved`, then constants, then those that steps create.
class Program {
 public:
  // `alignment`: bytes; addresses of given tensors are what they were, modulo this.
  Program(Memory memory, std::size_t alignment);
  Program(const Program&) = delete;  // the steps refer to it
  Program& operator=(const Program&) = delete;

  // In the order of their numbers; an address of 0 is that of None in the place of a tensor.
  void add_leading(std::size_t address);
  void add_saved(std::size_t address);
  void add_constant(pybind11::object tensor, std::size_t address);

  void add_empty(int tensor, pybind11::tuple size, pybind11::tuple stride, pybind11::object dtype);
  void add_launch(std::shared_ptr<Launch> launch);
  // function(*arguments, **keywords), where `from` are numbers of tensors, or -1 for an argument
  // that is passed as it is.
  void add_call(int tensor, pybind11::object function, pybind11::list arguments,
                std::vector<int> from, pybind11::dict keywords);
  // Drops a tensor that no later step reads; one of `saved` is None in the list from then on.
  void add_release(int tensor);

  void add_result(int tensor);  // -1: None
  void add_view(int tensor, pybind11::tuple size, pybind11::tuple stride, std::int64_t offset);

  // Returns the results as a tuple, and `saved` is an empty list afterwards; or None, and has done
  // nothing, where the tensors are not what they were.
  pybind11::object run(const pybind11::tuple& leading, const pybind11::object& saved) const;

 private:
  struct Given {
    bool is_tensor;
    std::size_t address;
  };
  struct Result {
    int tensor = -1;
    bool is_view = false;
    pybind11::tuple size, stride;
    std::int64_t offset = 0;
  };

  bool take(Frame* frame, int tensor, pybind11::handle object, const Given& expected) const;
  bool is_saved(int tensor) const;
  void check_number(int tensor) const;

  Memory memory_;
  std::size_t alignment_;
  std::vector<Given> leading_, saved_, constants_;
  std::vector<pybind11::object> constant_tensors_;
  std::vector<std::function<void(Frame*)>> steps_;
  std::vector<Result> results_;
  int num_tensors_ = 0;
};

void register_repeat(pybind11::module_& module);

}  // namespace fp8core::bindings
