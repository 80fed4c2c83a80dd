"""Loop nests of fused primitives, whatever language prints them: stages, axes, addresses, and bodies on demand."""
