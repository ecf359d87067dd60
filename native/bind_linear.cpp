#include "bind.h"

void bind_linear(nanobind::module_&) {}
