#include "bind.h"

void bind_attention(nanobind::module_&) {}
