"""Independent formulas in float64. Nothing here imports headrace: it is what the kernels are measured against."""
