"""Integer, float and logic instructions on registers, as nvcc emits them by itself."""
