#include "bind.h"

void bind_pack(nanobind::module_&) {}
