#include "bind.h"

void bind_rowwise(nanobind::module_&) {}
