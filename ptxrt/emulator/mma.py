"""Matrix multiply-accumulate on fragments held by a warp (PTX ISA 9.7.14)."""
