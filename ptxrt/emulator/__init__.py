"""Execute PTX text on NumPy arrays."""
