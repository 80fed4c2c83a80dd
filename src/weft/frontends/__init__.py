"""Importers: a model of some framework -> `Imported`, a graph of primitives with the operators they came from."""
