"""Exchange and votes between the lanes of a warp (PTX ISA 9.7.9 and 9.7.13)."""
