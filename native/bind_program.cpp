#include "bind.h"

void bind_program(nanobind::module_&) {}
