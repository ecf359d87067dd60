// The Python module: levels here, each family's bindings in its own bind_*.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind.h"
#include "kernels.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.doc() = "Headrace's kernels and the program that runs a step.";
  m.def(
      "levels",
      [] {
        std::vector<std::string> names;
        for (int i = 0; i < headrace::num_levels(); i++) names.emplace_back(headrace::level_name(i));
        return names;
      },
      "Instruction-set levels this CPU and operating system support, best first.");
  m.def("level", [] { return std::string(headrace::kernels_level()); }, "The level in use.");
  m.def(
      "use",
      [](const std::string& name) {
        if (!headrace::use_level(name.c_str())) throw nb::value_error(("[use] level: '" + name + "' is unknown or not supported here").c_str());
      },
      nb::arg("name"), "Switch every kernel to a level.");
  bind_linear(m);
  bind_attention(m);
  bind_rowwise(m);
  bind_pack(m);
  bind_program(m);
}
