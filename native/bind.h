// One binding function a family, each in bind_<family>.cpp.
#pragma once
#include <nanobind/nanobind.h>

void bind_linear(nanobind::module_& m);     // bind_linear.cpp
void bind_attention(nanobind::module_& m);  // bind_attention.cpp
void bind_rowwise(nanobind::module_& m);    // bind_rowwise.cpp: rowwise and sampling
void bind_pack(nanobind::module_& m);       // bind_pack.cpp
void bind_program(nanobind::module_& m);    // bind_program.cpp
